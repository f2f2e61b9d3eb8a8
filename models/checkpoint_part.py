"""One stage's part of a checkpoint: its tensors, by name without the model's prefix."""

import re
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.core.layer_range import LayerRange, Part
from models.blocks.spec import DecoderSpec
from models.checkpoint import Checkpoint, WeightEntry, read_rows, read_tensor, transposed
from models.decoder import EMBEDDING, FINAL_NORM, HEAD
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError

# Wrappers put the text model under one of these prefixes; the longest match counts. The prefix
# depends on the keys, not on the architecture: a wrapper that was saved as its text model keeps the
# wrapper's keys.
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_NOT_OURS = re.compile(
    r"^(model\.)?(mtp|visual|vision_(tower|model)|multi_modal_projector|audio_tower|"
    r"embed_(vision|audio))\.|\.rotary_emb\.inv_freq$"
)
REPORT_S = 2.0  # between two progress reports
Report = Callable[[int, int], None]
LAYER_NAME = re.compile(r"layers\.(\d+)\.")
_NOTHING = torch.empty(0)


class CheckpointPart:
    """One stage's part of a checkpoint, and the problems found while it is read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        layers: LayerRange,
        digest: WeightsDigest | None,
        report: Report | None = None,
    ) -> None:
        """Create the part.

        `report` is called every `REPORT_S` seconds of reading with the bytes of files that were read
        and their total.
        """
        self._entries = stage_entries(checkpoint, spec, layers)
        self._digest = digest
        self._report = report
        self._total_bytes = sum(map(_stored_bytes, self._entries.values()))
        self._read_bytes = 0
        self._reported_s = time.monotonic()
        self._taken: set[str] = set()
        self._missing: set[str] = set()
        self._misshapen: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        entry = self._entries.get(name)
        if entry is None:
            self._missing.add(name)
            return
        self._taken.add(name)
        expected = tuple(out.shape) if item is None else (item[1], *out.shape)
        if entry.shape != expected:
            self._misshapen.add(f"{name} is {list(entry.shape)}, the config says {list(expected)}")
            return
        read_tensor(
            entry, out, name=name, digest=self._digest, item=None if item is None else item[0]
        )
        self._count(entry, is_item=item is not None)

    def read_rows(
        self, name: str, out: Tensor, rows: Sequence[Part], columns: Part | None = None
    ) -> None:
        """Implement `PartSource.read_rows`."""
        entry = self._entries.get(name)
        if entry is None:
            self._missing.add(name)
            return
        self._taken.add(name)
        expected = [rows[0].total, *out.shape[1:]]
        if columns is not None:
            expected[-1] = columns.total
        if list(entry.shape) != expected:
            self._misshapen.add(f"{name} is {list(entry.shape)}, the config says {expected}")
            return
        read_rows(entry, out, rows, columns, name=name, digest=self._digest)
        self._count(entry)

    def row_scales(self, name: str, *, item: int | None = None) -> Tensor | None:
        """Implement `WeightSource.row_scales`."""
        return self._entries[name].row_scales(item=item) if name in self._entries else None

    def skip(self, name: str, item: int | None = None) -> None:
        """Implement `PartSource.skip`."""
        entry = self._entries.get(name)
        if entry is None:
            self._missing.add(name)
            return
        self._taken.add(name)
        read_rows(entry, _NOTHING, (), None, name=name, digest=self._digest, item=item)
        self._count(entry, is_item=item is not None)

    def _count(self, entry: WeightEntry, *, is_item: bool = False) -> None:
        """Count a read tensor, or an entry of a stack, and report if it is time."""
        if self._report is None:
            return
        self._read_bytes += _stored_bytes(entry) // (entry.shape[0] if is_item else 1)
        now = time.monotonic()
        if now - self._reported_s >= REPORT_S:
            self._reported_s = now
            # A tensor of two parts, such as a tied embedding, is read twice.
            self._report(min(self._read_bytes, self._total_bytes), self._total_bytes)

    def finish(self) -> None:
        """Check that everything fitted.

        Raises:
            ConfigError: some tensors did not fit. One message lists all problems.
        """
        unexpected = self._entries.keys() - self._taken
        complaints = [
            f"{what}: {_listing(names)}"
            for what, names in (
                ("missing", self._missing),
                ("wrong shape", self._misshapen),
                ("unexpected", unexpected),
            )
            if names
        ]
        if complaints:
            raise ConfigError(
                "the checkpoint's tensors do not fit its config; " + "; ".join(complaints),
                field="model",
            )


def _stored_bytes(entry: WeightEntry) -> int:
    return sum(each.num_bytes for each in entry.stored)


def stage_entries(
    checkpoint: Checkpoint, spec: DecoderSpec, layers: LayerRange
) -> dict[str, WeightEntry]:
    """Return the tensors that a stage owns, by name without the model's prefix.

    Layers of other stages are excluded by layer id, before the rest of their names is examined.
    With a tied head, the last stage owns the embedding too.
    """
    is_first = layers.start == 0
    is_last = layers.end == spec.num_layers
    shared = {
        EMBEDDING: is_first or (is_last and spec.tied_head),
        FINAL_NORM: is_last,
        HEAD: is_last and not spec.tied_head,
    }
    end = spec.num_layers + spec.num_extra_layers
    owned = {}
    for key, entry in checkpoint.entries.items():
        if _NOT_OURS.search(key):
            continue
        name = without_prefix(key, spec.other_names)
        layer = LAYER_NAME.match(name)
        if layer is None:
            # Every stage owns unknown names, so that they are reported.
            mine = shared.get(name, True)
        else:
            layer_id = int(layer[1])
            mine = layer_id in layers or layer_id >= end
        if mine:
            owned[name] = transposed(entry) if name.endswith(spec.inputs_first) else entry
    return owned


def without_prefix(key: str, other_names: Sequence[tuple[str, str]]) -> str:
    """Return a key without the model's prefix; `other_names` are those of `DecoderSpec`."""
    name = key.removeprefix(next((prefix for prefix in _PREFIXES if key.startswith(prefix)), ""))
    for theirs, ours in other_names:
        name = name.replace(theirs, ours)
    return name


def target_entry(checkpoint: Checkpoint, name: str) -> WeightEntry | None:
    """Return the tensor with this name under the model's prefix, for a draft that shares it."""
    return next(
        (
            checkpoint.entries[key]
            for key in (*(prefix + name for prefix in _PREFIXES), name)
            if key in checkpoint.entries
        ),
        None,
    )


def _listing(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
