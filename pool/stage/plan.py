"""The plan of a stage: its layers, ranks, weights and frames, before anything is loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.layer_range import LayerRange, balanced_counts, get_pp_indices
from engine.core.numerics import HOST, WeightFormat
from engine.memory.budget import describe_pools
from engine.memory.layout import CacheSpec, PoolGeometry
from engine.pipeline.frame_parts import MAX_PART_BYTES
from models.adapters import read_adapters
from models.loader import ModelDescription, read_model
from models.weights_digest import PoolWeights
from pool.stage.config import BALANCED, LEAST_ADAPTER_MB, WorkerConfig
from pool.stage.pool_size import (
    Memory,
    PoolNeeds,
    PoolSize,
    memory_of,
    plan_pool_size,
    resume_notice,
)
from pool.stage.settings import stage_settings
from pool.stage.speculation_plan import (
    DraftModelPlan,
    SpeculationPlan,
    check_frozen,
    plan_speculation,
)
from runtime.digests import Compatibility
from runtime.errors import ConfigError
from runtime.grammar import MAX_GRAMMAR_BYTES
from runtime.process.host_memory import MIB, is_out_of_memory, memory_left
from transfer.plan.compatibility import compatibility


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage, derived from checkpoint and configuration alone.

    It is the same on every stage, except for `geometry.layers`. A draft model whose cache is part
    of the handoff counts as further layers of the last stage, in `ranges` and `geometry`.
    """

    description: ModelDescription
    ranges: list[LayerRange]
    geometry: PoolGeometry
    settings: Mapping[str, str]  # settings that all stages of a pool must share, by name
    size: PoolSize
    max_held: int  # requests that hold memory at the same time
    speculation: SpeculationPlan | None = None
    # Records for the states of trees, including the null record; 0 if no layer keeps states.
    num_scratch: int = 0
    resume_notice: str = ""  # text for operators about the positions at which prompts resume

    @property
    def max_context_tokens(self) -> int:
        """Return the most tokens of prompt and output together."""
        return self.size.context_tokens

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the texts that an operator should know about this model on this machine."""
        draft = () if self.speculation is None else self.speculation.notices
        found = (*self.description.notices, *draft, self.size.notice, self.resume_notice)
        # Duplicates are dropped: a draft may be part of the model's own files.
        return tuple(dict.fromkeys(notice for notice in found if notice))

    @property
    def model_layers(self) -> LayerRange:
        """Return the target model's layers of this stage."""
        return self.geometry.layers.intersect(LayerRange(0, self.description.facts.num_layers))

    @property
    def has_draft_model(self) -> bool:
        return isinstance(self.speculation, DraftModelPlan)

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.config.num_draft_tokens if self.speculation is not None else 0

    def compatibility(self, weights: PoolWeights) -> Compatibility:
        """Return the digest that pools compare, once all stages have reported their weights."""
        draft = "" if self.speculation is None else self.speculation.revision
        return compatibility(
            revision=weights.revision(self.description.facts.revision),
            specs=self.geometry.specs,
            page_size=self.geometry.page_size,
            numerics=self.settings["numerics"],
            weights=self.settings["weights"],
            arithmetic=self.settings["arithmetic"],
            max_context=self.settings["max_context"],
            draft_revision=weights.draft_revision(draft),
            config=self.description.facts.revision,
            tensors=weights.total,
        )


def plan_stage(
    config: WorkerConfig,
    *,
    max_held: int | None = None,
    speculates: bool = False,
    keeps_states: bool = False,
    reads_prompts: bool = False,
    memory: Memory = memory_of,
) -> StagePlan:
    """Plan a stage from the checkpoint's headers and the pool sizes derived from them.

    `max_held` requests may hold memory at the same time (default: `max_running`). Roles that do not
    speculate use the draft model only to send its cache of the prompt. With `keeps_states` there
    are slots for cached recurrent states, if the model has any. With `reads_prompts` a balanced
    partition ignores the head, because few tokens of a chunk need it. `memory` returns the memory
    of the machine or device of the stage.

    Raises:
        ConfigError: it does not fit; the message shows the arithmetic.
    """
    place = config.placement
    whole = _read_whole(config)
    description = whole.of_rank(place.tensor)
    ranges = _layers_of_stages(config, whole, reads_prompts=reads_prompts)
    speculation = _speculation_of_role(config, whole, ranges[-1], speculates=speculates)
    caches = _caches_of(config, description, speculation, speculates=speculates)
    if speculation is not None:
        ranges[-1] = _with_draft(ranges[-1], speculation, config.page_size)
    held = config.max_running if max_held is None else max_held
    num_scratch = config.max_running + 1 if caches.scratch else 0
    draft_bytes = 0 if speculation is None else speculation.weight_bytes
    max_snapshots = _max_snapshots(config, caches) if keeps_states else 0
    divided = place.tensor.attention
    # No rank has a larger part than the first, and all ranks plan alike.
    first = divided.every[0]
    largest = tuple(spec.of_rank(first) for spec in (*caches.handed, *caches.draft))
    needs = PoolNeeds(largest, held, caches.scratch, num_scratch, draft_bytes, max_snapshots)
    size = plan_pool_size(config, description, ranges, needs, memory)
    layers = ranges[place.pipeline_rank]
    geometry = PoolGeometry(
        config.page_size, size.num_pages, size.num_slots, layers, caches.handed, divided
    )
    settings = stage_settings(
        config,
        description,
        ranges,
        size,
        max_held=held,
        speculation=speculation,
        speculates=speculates,
    )
    notice = resume_notice(config, description.facts.chunk_grid) if max_snapshots else ""
    return StagePlan(
        description, ranges, geometry, settings, size, held, speculation, num_scratch, notice
    )


@dataclass(frozen=True)
class _PlannedCaches:
    """The caches of a whole model.

    handed   those of the target, and those of its draft model that are part of the handoff
    draft    those of the draft model that are not
    scratch  the states of trees, as the first rank has them
    """

    handed: tuple[CacheSpec, ...]
    draft: tuple[CacheSpec, ...] = ()
    scratch: tuple[CacheSpec, ...] = ()


def _caches_of(
    config: WorkerConfig,
    description: ModelDescription,
    speculation: SpeculationPlan | None,
    *,
    speculates: bool,
) -> _PlannedCaches:
    target = description.cache_specs(config.page_size)
    if speculation is None:
        return _PlannedCaches(target)
    handed = (*target, *speculation.handed_specs(config.page_size))
    if not speculates:
        return _PlannedCaches(handed)
    first = config.placement.tensor.attention.every[0]
    return _PlannedCaches(
        handed,
        speculation.own_specs(target, config.page_size),
        speculation.scratch_specs(tuple(spec.of_rank(first) for spec in target)),
    )


def _with_draft(last: LayerRange, speculation: SpeculationPlan, page_size: int) -> LayerRange:
    """Return the layers of the last stage, with those of the draft that are handed over."""
    drafted = {spec.layer_id for spec in speculation.handed_specs(page_size)}
    return LayerRange(last.start, last.end + len(drafted))


def _max_snapshots(config: WorkerConfig, caches: _PlannedCaches) -> int:
    """Return how many recurrent states may be cached; 0 if the model has none."""
    if not config.prefix_cache or not any(spec.kind.is_state for spec in caches.handed):
        return 0
    return config.prefix_snapshots or 2 * config.max_running


def _read_whole(config: WorkerConfig) -> ModelDescription:
    """Describe the whole model; raise ConfigError if the device or the ranks cannot run it."""
    weight_format = WeightFormat(config.weights)
    if weight_format.is_coded and config.device != HOST.type:
        raise ConfigError(
            f"weights {weight_format} are for device cpu, not {config.device}", field="weights"
        )
    whole = read_model(config.model, weight_format=weight_format)
    _check_experts(config, whole)
    return whole if config.adapters is None else _with_adapters(config, config.adapters, whole)


def _with_adapters(config: WorkerConfig, folder: Path, whole: ModelDescription) -> ModelDescription:
    """Return the model with the adapters in `folder`; raise ConfigError if it cannot have any."""
    adapters = read_adapters(folder)
    needed = sum(map(whole.bytes_of, adapters))
    megabytes = config.adapters_mb
    if megabytes is None:
        # Rounded, so that stages that start at other times, with an adapter more, plan alike.
        megabytes = max(LEAST_ADAPTER_MB, 1 << (-(-needed // MIB) - 1).bit_length())
    return replace(whole, adapters=adapters, adapter_bytes=megabytes * MIB)


def _speculation_of_role(
    config: WorkerConfig, whole: ModelDescription, last: LayerRange, *, speculates: bool
) -> SpeculationPlan | None:
    """Return the plan of speculation, or of a draft's cache that is only sent.

    `last` are the layers of the last stage.
    """
    if not speculates and not config.spec_prompt:
        return None
    speculation = plan_speculation(config, whole)
    if speculation is None:
        return None
    if speculates:
        if isinstance(speculation, DraftModelPlan):
            check_frozen(speculation, last, config.placement.tensor)
        return speculation
    return speculation if speculation.handed else None


def _check_experts(config: WorkerConfig, description: ModelDescription) -> None:
    """Check that --ep is equivalent to --tp, and that the model has experts.

    Raises:
        ConfigError: it is not.
    """
    if config.ep and config.ep != config.tp:
        raise ConfigError(
            f"--ep {config.ep}: experts are spread over all ranks of a stage, of which --tp gives it "
            f"{config.tp}",
            field="ep",
        )
    if config.ep > 1 and not any(
        layer.feed_forward.num_experts for layer in description.spec.layers
    ):
        raise ConfigError(
            f"--ep {config.ep}: {description.facts.architecture} has no experts", field="ep"
        )


def _layers_of_stages(
    config: WorkerConfig, model: ModelDescription, *, reads_prompts: bool
) -> list[LayerRange]:
    size, partition = config.placement.pipeline_size, config.partition
    if partition and size == 1:
        raise ConfigError(
            f"--partition {partition} names the layers of several stages, and this pool has one: "
            f"--world-size sets their number (with baton up, --prefill-pp and --decode-pp)",
            field="partition",
        )
    if partition == BALANCED:
        partition = ",".join(
            map(str, balanced_counts(model.layer_bytes(with_head=not reads_prompts), size))
        )
    return [
        get_pp_indices(model.facts.num_layers, rank, size, partition or None)
        for rank in range(size)
    ]


@contextmanager
def naming_memory(config: WorkerConfig, plan: StagePlan) -> Iterator[None]:
    """Raise ConfigError with the memory figures if memory runs out while the stage loads."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place, layers = config.placement, plan.ranges[config.placement.pipeline_rank]
        weights = plan.description.weight_bytes(layers, place.tensor)
        free = (
            memory_left() if config.device == HOST.type else f"device {config.device} has no more"
        )
        raise ConfigError(
            f"out of memory while loading {weights / MIB:.0f} MiB of weights and allocating "
            f"{describe_pools(plan.geometry)}; {free}: a smaller --memory-mb or --max-running, or more "
            f"stages, take less",
            field="memory_mb",
        ) from error


def max_frame_bytes(config: WorkerConfig, plan: StagePlan) -> int:
    """Return an upper bound of the bytes of a batch, or of an exchange between ranks.

    It covers the hidden states (and three captured ones) and selected keys of a full chunk with its
    scores, and the tables of all rows. Per row it covers everything that sampling may carry: the
    tokens of the context, biases, bans and a grammar.
    """
    facts = plan.description.facts
    tokens = max(config.chunk_tokens, plan.max_held * (1 + plan.num_draft_tokens))
    latent = plan.description.latent_geometry(config.page_size)
    per_token = (
        4 * facts.hidden_size * 4 + 50 * 8 + 4 * (0 if latent is None else latent.max_selected)
    )
    per_row = MAX_GRAMMAR_BYTES + 8 * (3 * plan.max_context_tokens + 2 * 1024 + 64 + 64)
    per_row += 4 * (plan.geometry.num_pages + 1)
    part = 0 if config.tp == 1 else max(MAX_PART_BYTES, 4 * facts.vocab_size)
    return max(tokens * per_token + plan.max_held * per_row, part) + (1 << 16)
