"""The source of a draft's tensors: its own files, or the target's embedding, head and final norm.

A draft runs whole on the target's last stage, in any pipeline. So it reads its own copies.
"""

from dataclasses import dataclass

import torch

from engine.core.numerics import HOST, Numerics, WeightFormat
from models.blocks.config import RawConfig
from models.blocks.random_weights import RandomWeights
from models.blocks.weights import Weights, WeightSource
from models.checkpoint import WeightEntry, read_tensor
from models.checkpoint_part import target_entry
from models.decoder import EMBEDDING, FINAL_NORM, HEAD
from models.loader import ModelDescription
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError


@dataclass(frozen=True)
class DraftFiles:
    """The inputs for building a draft: its config, its tensors by name, and the target."""

    raw: RawConfig
    weights: Weights
    target: ModelDescription


class DraftWeights:
    """A `WeightSource` over a draft's entries.

    If they are missing, `embed_tokens`, `lm_head` and (as `target_norm`) the final norm are those
    of the target.
    """

    def __init__(
        self,
        entries: dict[str, WeightEntry] | None,
        target: ModelDescription,
        digest: WeightsDigest,
        target_digest: WeightsDigest,
    ) -> None:
        """Create the source. Without entries, the draft's weights are random."""
        self._entries = entries
        self._digest = digest
        self._target_digest = target_digest
        self._target = target
        self._random = RandomWeights(seed=1)
        self._complaints: set[str] = set()
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self._entries is None or name in self._entries

    def read(self, name: str, out: torch.Tensor, *, item: tuple[int, int] | None = None) -> None:
        """Implement `WeightSource.read`."""
        if self._entries is None and not _is_shared(name):
            self._random.read(name, out, item=item)
            return
        entry = (self._entries or {}).get(name)
        self._taken.add(name)
        if entry is None and _is_shared(name):
            self._read_target(name, out)
        elif entry is None:
            self._complaints.add(f"{name} is missing")
        elif entry.shape != (tuple(out.shape) if item is None else (item[1], *out.shape)):
            self._complaints.add(
                f"{name} is {list(entry.shape)}, the config says {list(out.shape)}"
            )
        else:
            read_tensor(
                entry, out, name=name, digest=self._digest, item=None if item is None else item[0]
            )

    def row_scales(self, name: str, *, item: int | None = None) -> torch.Tensor | None:
        """Implement `WeightSource.row_scales`."""
        entry = (self._entries or {}).get(name)
        return None if entry is None else entry.row_scales(item=item)

    def finish(self) -> None:
        """Check that everything fitted.

        Raises:
            ConfigError: some tensors did not fit. The message lists the first of them.
        """
        unexpected = (self._entries or {}).keys() - self._taken
        complaints = sorted(self._complaints) + [
            f"{name} is unexpected" for name in sorted(unexpected)
        ]
        if complaints:
            raise ConfigError(
                f"the draft's tensors do not fit its config: {'; '.join(complaints[:8])}",
                field="draft",
            )

    def _read_target(self, name: str, out: torch.Tensor) -> None:
        spec = self._target.spec
        name = {"target_norm.weight": FINAL_NORM}.get(name, name)
        if name == HEAD and spec.tied_head:
            name = EMBEDDING
        if self._target.checkpoint is None:
            RandomWeights(seed=0).read(name, out)
            return
        entry = target_entry(self._target.checkpoint, name)
        if entry is None or entry.shape != tuple(out.shape):
            self._complaints.add(
                f"the target's {name} is {None if entry is None else list(entry.shape)}, the draft "
                f"wants {list(out.shape)}"
            )
        else:
            read_tensor(entry, out, name=name, digest=self._target_digest)


def draft_weights(
    source: WeightSource,
    *,
    dtype: str,
    numerics: Numerics,
    device: torch.device = HOST,
    weight_format: WeightFormat = WeightFormat.MODEL,
) -> Weights:
    """Return the weights that the draft's blocks read from."""
    return Weights(
        source,
        prefix="",
        dtype=getattr(torch, dtype),
        numerics=numerics,
        device=device,
        weight_format=weight_format,
    )


def _is_shared(name: str) -> bool:
    return name in (EMBEDDING, HEAD, "target_norm.weight")
