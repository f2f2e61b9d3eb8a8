"""Checkpoint loading: first the facts of a model, then the weights of a stage on request.

`read_model` reads configs and file headers. `load_stage` builds the blocks of one layer range. Each
block requests its own tensors, so a stage reads only its own bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch

from engine.contracts.attention import AttentionGeometry
from engine.contracts.latent import LatentGeometry
from engine.contracts.model import ModelFacts, RanksOfStage
from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank
from engine.core.numerics import HOST, Numerics, WeightFormat
from engine.kernels.host.codegen.compiled import has_kernels
from engine.memory.layout import CacheSpec
from models.adapters import Adapter, StageFactors
from models.blocks.adapted import StageAdapters
from models.blocks.config import (
    RawConfig,
    architecture_of,
    dtype_name,
    has_dtype,
    read_config_file,
    text_config,
)
from models.blocks.kept_bytes import kept_bytes
from models.blocks.random_weights import RandomWeights
from models.blocks.spec import DecoderSpec
from models.blocks.weights import PartSource, Weights
from models.checkpoint import Checkpoint, WeightEntry, same_content
from models.checkpoint_part import LAYER_NAME, CheckpointPart, Report, stage_entries, target_entry
from models.decoder import EMBEDDING, HEAD, DecoderStage
from models.quantized_formats import open_checkpoint
from models.registry import read_decoder
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError
from runtime.model_files.end_tokens import read_end_tokens, stated_end_tokens
from runtime.model_files.model_folder import check_model_folder
from runtime.model_files.weights import weight_files

_EXPERTS = ".experts."  # in names of tensors that belong to whole experts, which ranks do not cut
_REVISION_IGNORES = ("transformers_version", "_name_or_path")


@dataclass(frozen=True)
class ModelDescription:
    """A checkpoint, or a config without one, before any weight is loaded."""

    facts: ModelFacts
    spec: DecoderSpec
    checkpoint: Checkpoint | None = field(repr=False)  # None if weights are random
    weight_format: WeightFormat = WeightFormat.MODEL  # of projections
    notices: tuple[str, ...] = ()  # messages for the operator about how the files were read
    adapters: tuple[Adapter, ...] = ()  # that are known at the start
    adapter_bytes: int | None = None  # of memory for adapters of all layers; None: for all

    def cache_specs(self, page_size: int) -> tuple[CacheSpec, ...]:
        """Return the cache specs of every layer of the whole model, in layer order."""
        return tuple(
            spec
            for layer_id, layer in enumerate(self.spec.layers)
            for spec in layer.mixer.cache_specs(
                layer_id=layer_id, page_size=page_size, dtype=self.dtype
            )
        )

    def attention_geometry(self, page_size: int) -> AttentionGeometry | None:
        """Return the geometry of the layers with K/V, or None if there are none.

        They share one geometry. Layers with a window have another one, in `windowed`.
        """
        found = (layer.mixer.attention_geometry(page_size) for layer in self.spec.layers)
        geometries = [geometry for geometry in found if isinstance(geometry, AttentionGeometry)]
        windowed = next((geometry for geometry in geometries if geometry.window is not None), None)
        whole = next((geometry for geometry in geometries if geometry.window is None), windowed)
        return None if whole is None else replace(whole, windowed=windowed)

    def latent_geometry(self, page_size: int) -> LatentGeometry | None:
        """Return the geometry that all latent attention layers share, or None if there are none."""
        found = (layer.mixer.attention_geometry(page_size) for layer in self.spec.layers)
        return next((geometry for geometry in found if isinstance(geometry, LatentGeometry)), None)

    @property
    def counts_on_host(self) -> bool:
        """Return whether any layer counts on the host; see `FeedForwardSpec.counts_on_host`."""
        return any(layer.feed_forward.counts_on_host for layer in self.spec.layers)

    def of_rank(self, rank: TensorRank) -> "ModelDescription":
        """Return the description for one of the ranks that share a stage.

        Its layers have the rank's part of the heads, experts and columns. Caches are still
        described whole (`CacheSpec.of_rank`).

        Raises:
            ConfigError: the model cannot be divided between the ranks.
        """
        return self if rank.size == 1 else replace(self, spec=self.spec.of_rank(rank))

    def weight_bytes(self, layers: LayerRange, rank: TensorRank = ONLY_RANK) -> int:
        """Return the least bytes of weights that each rank of a stage of these layers holds.

        Weights are counted in their format, and all but experts as if the ranks had equal shares,
        so that all ranks plan alike. Random weights count as 0.
        """
        if self.checkpoint is None:
            return 0
        num_bytes = 0
        by_request = {f".{layer.mixer.weights_name}." for layer in self.spec.layers}
        for name, entry in stage_entries(self.checkpoint, self.spec, layers).items():
            own = rank.attention if any(part in name for part in by_request) else rank
            whole = self._kept_bytes(name, entry.shape, layers)
            held = 1
            total = own.size
            if _EXPERTS in name:
                held, total = self._most_experts(name, own)
            num_bytes += -(-whole * held // total)
        share = len(layers) / self.facts.num_layers
        return num_bytes + round(share * (self.adapter_bytes or 0))

    def _most_experts(self, name: str, rank: TensorRank) -> tuple[int, int]:
        """Return the largest number of experts on a rank, and the layer's number of experts."""
        layer = LAYER_NAME.match(name)
        layer_id = self.spec.num_layers if layer is None else int(layer[1])
        total = (
            self.spec.layers[layer_id].feed_forward.num_experts
            if layer_id < self.spec.num_layers
            else 0
        )
        return (-(-total // rank.size), total) if total else (1, rank.size)

    def layer_bytes(self, *, with_head: bool) -> list[int]:
        """Return the bytes that a step reads of each layer's weights, with all experts.

        `with_head` adds the head to the last layer. The embedding is not included, because a token
        reads one row of it. Random weights count as 0.
        """
        read = [0] * self.spec.num_layers
        if self.checkpoint is None:
            return read
        head = EMBEDDING if self.spec.tied_head else HEAD
        for name, entry in stage_entries(
            self.checkpoint, self.spec, LayerRange(0, self.spec.num_layers)
        ).items():
            layer = LAYER_NAME.match(name)
            num_bytes = self.coded_bytes(name, entry.shape, self.dtype)
            if layer is not None and int(layer[1]) < len(read):
                read[int(layer[1])] += num_bytes
            elif name == head and with_head:
                read[-1] += num_bytes
        return read

    def _kept_bytes(self, name: str, shape: tuple[int, ...], layers: LayerRange) -> int:
        """Return the bytes of one tensor.

        An embedding keeps its dtype, so a head that is tied to it is a separate copy of codes.
        """
        coded = self.coded_bytes(name, shape, self.dtype)
        if name != EMBEDDING or not self.weight_format.is_coded:
            return coded
        is_head = self.spec.tied_head and layers.end == self.spec.num_layers
        return (kept_bytes(shape, self.dtype) if layers.start == 0 else 0) + (
            coded if is_head else 0
        )

    def coded_bytes(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes of a tensor of this model, or of its draft, in the format of its name."""
        is_head = name in (EMBEDDING, HEAD)
        own = self.weight_format.of_head if is_head else self.weight_format
        return kept_bytes(shape, dtype, own)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights that are not coded, and of activations."""
        found: torch.dtype = getattr(torch, self.facts.dtype)
        return found

    def load_stage(
        self,
        layers: LayerRange,
        *,
        numerics: Numerics,
        capture_layers: frozenset[int] = frozenset(),
        device: torch.device = HOST,
        digest: WeightsDigest | None = None,
        ranks: RanksOfStage | None = None,
        report: Report | None = None,
    ) -> DecoderStage:
        """Build one stage, or this rank's part of it, with its own weights on `device`.

        `ranks` are those of the stage, if it has several. Then this description must be that of the
        rank (`of_rank`). `capture_layers` are global ids of layers whose outputs travel in
        `StageOutput.aux_hidden`. `digest` gets every byte that is read, and `report` regularly their number and the
        total.

        Raises:
            ConfigError: tensors are missing, unexpected, of the wrong shape or of an unsupported
                dtype, or a file is damaged. One message lists all missing, unexpected and misshapen
                tensors.
        """
        if layers.end > self.facts.num_layers or not layers:
            raise ConfigError(
                f"layers {layers} are not a stage of a model with {self.facts.num_layers} layers",
                field="partition",
            )
        unknown = sorted(
            layer_id for layer_id in capture_layers if layer_id >= self.facts.num_layers
        )
        if unknown:
            raise ConfigError(
                f"no layers {unknown} to capture in a model with {self.facts.num_layers}",
                field="capture_layers",
            )
        source = (
            RandomWeights(seed=0)
            if self.checkpoint is None
            else CheckpointPart(self.checkpoint, self.spec, layers, digest, report)
        )
        stage = self._build_stage(
            self._weights(source, numerics, device), layers, capture_layers, ranks
        )
        if isinstance(source, CheckpointPart):
            source.finish()
        for adapter in self.first_adapters:
            self.load_adapter(stage, adapter)
        return stage

    @property
    def first_adapters(self) -> tuple[Adapter, ...]:
        """Return the adapters that a stage loads with its layers: the first that fit in memory."""
        if self.adapter_bytes is None:
            return self.adapters
        ends = accumulate(map(self.bytes_of, self.adapters))
        fitting = sum(end <= self.adapter_bytes for end in ends)
        return self.adapters[:fitting]

    def bytes_of(self, adapter: Adapter) -> int:
        """Return the bytes of the factors of all layers in the model's dtype."""
        return adapter.num_values * self.dtype.itemsize

    def load_adapter(self, stage: DecoderStage, adapter: Adapter, key: str = "") -> None:
        """Load the factors of the stage's layers; the adapter is named by its key.

        Raises:
            ConfigError: it does not fit, is damaged, or has another key than one that is given.
                Nothing has changed then.
        """
        found, read = adapter.read()
        if key and found != key:
            other = f"{adapter.folder} has another version of the adapter than {key}: {found}"
            raise ConfigError(other, field="adapters")
        names = self.spec.other_names
        source = StageFactors(adapter, read, stage.layer_range, self.facts.num_layers, names)
        stage.adapters.load(found, source)

    def _weights(
        self,
        source: PartSource,
        numerics: Numerics,
        device: torch.device,
    ) -> Weights:
        has_adapters = self.adapter_bytes is not None or bool(self.adapters)
        return Weights(
            source,
            prefix="",
            dtype=self.dtype,
            numerics=numerics,
            device=device,
            parts=source,
            weight_format=self.weight_format,
            adapters=StageAdapters(has_any=has_adapters),
        )

    def _build_stage(
        self,
        weights: Weights,
        layers: LayerRange,
        capture_layers: frozenset[int],
        ranks: RanksOfStage | None,
    ) -> DecoderStage:
        return DecoderStage(
            facts=self.facts,
            spec=self.spec,
            layer_range=layers,
            weights=weights,
            ranks=ranks,
            capture_layers=capture_layers,
        )


def read_model(path: Path, *, weight_format: WeightFormat = WeightFormat.MODEL) -> ModelDescription:
    """Describe the checkpoint in folder `path`, with projections in `weight_format`.

    `facts.revision` is a digest of config.json, without the fields that only name its author, and
    of the names, dtypes and shapes of all tensors. Their bytes are digested when they are read
    (`load_stage`). End-of-sequence ids are those of `runtime.model_files.end_tokens`.

    Raises:
        ConfigError: the folder is not a checkpoint, its architecture or a field is not supported, a
            file is damaged, or the model's dtype has no products in this format.
    """
    check_model_folder(path)
    raw = read_config_file(path / "config.json")
    spec = read_decoder(architecture_of(raw), text_config(raw))
    checkpoint = open_checkpoint(path, text_config(raw), spec.inputs_first)
    ends = read_end_tokens(path, raw.as_dict(), spec.vocab_size).ids
    description = replace(
        _describe(raw, spec, checkpoint, ends), notices=notices_of(path, raw, checkpoint)
    )
    if weight_format.is_coded and not has_kernels(description.dtype):
        raise ConfigError(
            f"weights {weight_format}: there are no such products for models in {description.facts.dtype}, "
            f"only for those in bfloat16 and float32",
            field="weights",
        )
    return replace(description, weight_format=weight_format)


def random_model(config: dict[str, object]) -> ModelDescription:
    """Return a model of this config, the content of a config.json, with fixed random weights."""
    raw = RawConfig(config)
    spec = read_decoder(architecture_of(raw), text_config(raw))
    return _describe(raw, spec, None, stated_end_tokens(raw.as_dict(), spec.vocab_size))


def _describe(
    raw: RawConfig, spec: DecoderSpec, checkpoint: Checkpoint | None, end_token_ids: tuple[int, ...]
) -> ModelDescription:
    text = with_dtype(text_config(raw), checkpoint)
    if spec.tied_head and checkpoint is not None and _has_other_head(checkpoint):
        spec = replace(spec, tied_head=False)
    revision = description_digest(raw, None if checkpoint is None else checkpoint.entries)
    facts = ModelFacts(
        architecture=architecture_of(raw),
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_context_tokens=spec.max_context_tokens,
        dtype=dtype_name(text),
        eos_token_ids=end_token_ids,
        revision=revision,
        chunk_grid=max(layer.mixer.chunk_grid for layer in spec.layers),
        context_field=spec.context_field,
    )
    return ModelDescription(facts=facts, spec=spec, checkpoint=checkpoint)


def with_dtype(text: RawConfig, checkpoint: Checkpoint | None) -> RawConfig:
    """Return the config with a dtype.

    If it states none, that of the weights is used, as in transformers. Without weights that is
    float32.
    """
    if checkpoint is None or has_dtype(text):
        return text
    return text.updated({"dtype": checkpoint.usual_dtype()})


def notices_of(path: Path, raw: RawConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return messages for the operator about how the files in folder `path` were read."""
    own = (
        ""
        if has_dtype(text_config(raw))
        else (
            f"{path / 'config.json'} states no dtype: the model runs in the dtype of its weights, "
            f"{checkpoint.usual_dtype()}"
        )
    )
    return tuple(notice for notice in (weight_files(path).notice, own) if notice)


def description_digest(raw: RawConfig, entries: Mapping[str, WeightEntry] | None) -> str:
    """Return the digest of a config, and of the names, dtypes and shapes of all tensors, in hex.

    Fields that only name the config's author are ignored. `entries` None means random weights.
    """
    settings = {
        name: value for name, value in raw.as_dict().items() if name not in _REVISION_IGNORES
    }
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for name, entry in sorted((entries or {}).items()):
        digest.update(f"{name} {entry.kind}\n".encode())
    return digest.hexdigest()


def _has_other_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has a head that differs from the embedding.

    Such a head was trained separately, whatever the config states. transformers decides in the same
    way.
    """
    head = target_entry(checkpoint, HEAD)
    embedding = target_entry(checkpoint, EMBEDDING)
    return head is not None and embedding is not None and not same_content(head, embedding)
