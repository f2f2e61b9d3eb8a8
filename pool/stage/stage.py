"""One stage as a process holds it: model, pools, backends and transfer agent, built for its
layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.assembly.backend_set import Backends, StageBackends, StageCaches, build_executor
from engine.contracts.model import ModelFacts, StageModel
from engine.core.layer_range import LayerRange, balanced_counts, get_pp_indices
from engine.core.numerics import HOST, Numerics
from engine.graphs.runner import Replays
from engine.memory.budget import describe_pools
from engine.memory.heap import keep_freed_memory
from engine.memory.layout import CacheSpec, PoolGeometry
from engine.memory.pools import StagePools
from engine.pipeline.overlap import Overlap
from engine.pipeline.ranks import MAX_PART_BYTES, StageRanks
from engine.pipeline.stages import LayerObserver, StageExecutor
from engine.speculative.contracts.drafter import Drafter, PoolDrafter
from models.decoder import EMBEDDING
from models.loader import ModelDescription, read_model
from models.weights_digest import PoolWeights, StageWeights, WeightsDigest
from pool.stage.backends import choose_backends
from pool.stage.config import BALANCED, WorkerConfig
from pool.stage.graphs import build_draft_graphs, build_graphs, build_host_steps
from pool.stage.handoff import LayerMark, build_agent, layer_mark
from pool.stage.metrics import StageCounts, stage_counts
from pool.stage.pool_size import (
    Memory,
    PoolNeeds,
    PoolSize,
    memory_of,
    plan_pool_size,
    resume_notice,
)
from pool.stage.settings import stage_settings
from pool.stage.speculation import (
    SpeculationPlan,
    build_drafter,
    check_frozen,
    plan_speculation,
    prompt_drafter,
)
from pool.stage.warmup import run_every_kind
from runtime.clock import SystemClock
from runtime.digests import Compatibility
from runtime.errors import CapacityError, ConfigError
from runtime.grammar import MAX_GRAMMAR_BYTES, Grammars, load_grammars
from runtime.process.host_memory import MIB, is_out_of_memory, memory_left
from transfer.agent.agent import TransferAgent
from transfer.plan.compatibility import compatibility
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.transport.device import Route
from transfer.transport.refusals import RefusalReason
from transfer.ucx.settings import TransportProfile
from transfer.ucx.transport import UcxTransport

COPIED = (EMBEDDING,)  # tensors that more than one stage may read


@dataclass(frozen=True)
class StagePlan:
    """What follows from checkpoint and configuration alone; the same on every stage but for
    `geometry.layers`. A draft whose cache is handed over counts as further layers of the last
    stage, in `ranges` and `geometry`."""

    description: ModelDescription
    ranges: list[LayerRange]
    geometry: PoolGeometry
    settings: Mapping[str, str]  # what all stages of a pool must have alike, by name
    size: PoolSize
    max_held: int  # requests that hold memory at the same time
    speculation: SpeculationPlan | None = None
    num_scratch: int = (
        0  # records of the states of trees, the null one included; 0 where nothing keeps any
    )
    resume_notice: str = ""  # what an operator has to know of where prompts go on

    @property
    def max_context_tokens(self) -> int:
        """Of prompt and answer together."""
        return self.size.context_tokens

    @property
    def notices(self) -> tuple[str, ...]:
        """What an operator has to know of this model on this machine."""
        draft = () if self.speculation is None else self.speculation.draft.notices
        found = (*self.description.notices, *draft, self.size.notice, self.resume_notice)
        return tuple(
            dict.fromkeys(notice for notice in found if notice)
        )  # a draft may be in the model's own files

    @property
    def model_layers(self) -> LayerRange:
        """The target's layers of this stage."""
        return self.geometry.layers.intersect(LayerRange(0, self.description.facts.num_layers))

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.config.num_draft_tokens if self.speculation is not None else 0

    def compatibility(self, weights: PoolWeights) -> Compatibility:
        """What pools compare, once all stages have reported what they read."""
        draft = "" if self.speculation is None else self.speculation.draft.revision
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
    """Read the checkpoint's headers and derive pool sizes. Raises ConfigError with the arithmetic
    if it cannot fit.

    `max_held` requests may hold memory at the same time (default: those that may run). Roles that
    do not speculate look at the draft only to hand over its cache of the prompt. Those that keep
    states of prompts have slots for them, where the model has any. Where `reads_prompts`, a
    balanced partition leaves the head out of account: few tokens of a chunk need it. `memory` is
    that of the machine or device that the stage is for.
    """
    place = config.placement
    if config.weights == "int8" and config.device != HOST.type:
        raise ConfigError(f"weights int8 are for device cpu, not {config.device}", field="weights")
    whole = read_model(config.model, in_bytes=config.weights == "int8")
    _check_experts(config, whole)
    description = whole.of_rank(place.tensor)
    ranges = _layers_of_stages(config, whole, reads_prompts=reads_prompts)
    specs = description.cache_specs(config.page_size)
    speculation = plan_speculation(config, whole) if speculates or config.spec_prompt else None
    if speculation is not None and speculates:
        check_frozen(speculation, ranges[-1], place.tensor)
    elif speculation is not None and not speculation.handed:
        speculation = None
    extra: tuple[CacheSpec, ...] = ()
    scratch: tuple[CacheSpec, ...] = ()
    if speculation is not None:
        if speculates:
            extra = speculation.own_specs(specs, config.page_size)
            scratch = speculation.scratch_specs(
                tuple(spec.of_rank(place.tensor.attention) for spec in specs)
            )
        handed = speculation.handed_specs(config.page_size)
        specs, ranges[-1] = (
            (*specs, *handed),
            LayerRange(ranges[-1].start, ranges[-1].end + len({spec.layer_id for spec in handed})),
        )
    held = config.max_running if max_held is None else max_held
    num_scratch = config.max_running + 1 if scratch else 0
    draft_bytes = 0 if speculation is None else speculation.draft.weight_bytes
    has_states = keeps_states and config.prefix_cache and any(spec.kind.is_state for spec in specs)
    max_snapshots = (config.prefix_snapshots or 2 * config.max_running) if has_states else 0
    own = tuple(spec.of_rank(place.tensor.attention) for spec in (*specs, *extra))
    needs = PoolNeeds(own, held, scratch, num_scratch, draft_bytes, max_snapshots)
    size = plan_pool_size(config, description, ranges, needs, memory)
    geometry = PoolGeometry(
        config.page_size,
        size.num_pages,
        size.num_slots,
        ranges[place.pipeline_rank],
        specs,
        place.tensor.attention,
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
    notice = resume_notice(config, description.facts.chunk_grid) if has_states else ""
    return StagePlan(
        description, ranges, geometry, settings, size, held, speculation, num_scratch, notice
    )


def _check_experts(config: WorkerConfig, description: ModelDescription) -> None:
    """Raises ConfigError for an --ep that would be something else than what --tp already does."""
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
            f"--world-size says how many (with baton up, --prefill-pp and --decode-pp)",
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


@dataclass(frozen=True)
class Stage:
    """The parts of a running stage, or of one rank of it. `ranks` has no channel before the pool
    has formed."""

    plan: StagePlan
    pools: StagePools
    executor: StageExecutor
    agent: TransferAgent
    drafter: Drafter | None = None  # on the last stage of a pool that speculates
    ranks: StageRanks = field(default_factory=StageRanks)
    counts: StageCounts = field(default_factory=StageCounts)
    grammars: Grammars | None = None  # where tokens are drawn
    device: torch.device = HOST
    weights: StageWeights = field(default_factory=StageWeights)
    counted: Mapping[str, str] = field(
        default_factory=dict
    )  # digests of what stages behind this one copy, by name


def build_stage(
    config: WorkerConfig,
    plan: StagePlan,
    *,
    incarnation: str,
    on_event: Callable[[StageSessionEvent], None],
    observe_layers: Callable[[TransferAgent, LayerMark | None], LayerObserver | None],
    speculates: bool = False,
    on_refused: Callable[[RefusalReason], object] = lambda reason: None,
) -> Stage:
    """Load the stage's tensors and start its transfer agent. `observe_layers(agent, mark)` makes
    what is called for each layer that is done: the agent on the sending side, nothing on the
    receiving one. `on_refused` is given why a message of a handoff was not taken."""
    keep_freed_memory()
    torch.set_num_threads(config.threads)
    backends = choose_backends(config.device, Numerics(config.numerics), plan.description)
    pools = StagePools(plan.geometry, device=str(backends.device))
    speculation = plan.speculation
    digest, draft_digest = WeightsDigest(), WeightsDigest()
    place = config.placement
    overlap = Overlap(config.overlap_tokens) if config.overlap_tokens else None
    ranks = StageRanks(
        place.tensor,
        stage=place.pipeline_rank,
        step_limit_s=config.step_limit_s,
        while_under_way=overlap.pass_turn if overlap is not None else lambda: None,
    )
    model, runs_on = _load_layers(plan, pools, backends, digest, ranks, speculates=speculates)
    profile = TransportProfile(config.transport)
    transport = UcxTransport(
        profile=profile, clock=SystemClock(), binding=config.binding, on_refused=on_refused
    )
    agent = build_agent(
        pools,
        backends.device,
        transport,
        incarnation=incarnation,
        on_event=on_event,
        route=Route.DIRECT if profile.reaches_devices else Route.PINNED,
    )
    observer = observe_layers(agent, layer_mark(backends.device))
    graphs: Replays | None = None
    if backends.device == HOST:
        graphs = build_host_steps(config, plan.description, model, runs_on, observer)
    elif observer is None:  # what a device has captured calls nothing
        graphs = build_graphs(
            config,
            plan.description,
            model,
            runs_on,
            speculation.config if speculation is not None else None,
        )
    executor = build_executor(model, runs_on, backends.device, observer, graphs, overlap)
    drafter: PoolDrafter | None = None
    reader: Drafter | None = None
    if speculation is not None and place.draws:
        capture = partial(
            build_draft_graphs, config, runs_on.capturable if speculates else None, speculation
        )
        drafter = reader = build_drafter(
            speculation, pools, backends, capture, digest, draft_digest
        )
        if not speculates:
            reader = prompt_drafter(speculation, drafter, observer)
    grammars = _grammars(config, plan.description.facts)
    agent.start()  # last: whatever is refused above leaves no thread behind
    return Stage(
        plan,
        pools,
        executor,
        agent,
        reader,
        ranks,
        stage_counts(executor, drafter),
        grammars,
        backends.device,
        _stage_weights(digest, draft_digest, is_first=place.pipeline_rank == 0),
        digest.of(COPIED),
    )


@contextmanager
def naming_memory(config: WorkerConfig, plan: StagePlan) -> Iterator[None]:
    """Raise CapacityError with the sum where memory runs out while the stage loads."""
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
        raise CapacityError(
            f"out of memory while it loads {weights / MIB:.0f} MiB of weights and makes room for "
            f"{describe_pools(plan.geometry)}; {free}: a smaller --memory-mb or --max-running, or more "
            f"stages, take less",
            resource="memory",
        ) from error


def _stage_weights(
    digest: WeightsDigest, draft_digest: WeightsDigest, *, is_first: bool
) -> StageWeights:
    """The embedding is counted where it is looked up, and copied where it is a head, too, or a
    draft's."""
    copies = () if is_first else COPIED
    return StageWeights(digest.total(without=copies), digest.of(copies), draft_digest.total())


def _load_layers(
    plan: StagePlan,
    pools: StagePools,
    backends: Backends,
    digest: WeightsDigest,
    ranks: StageRanks,
    *,
    speculates: bool,
) -> tuple[StageModel, StageBackends]:
    """The target's layers of this stage and what they run on, ready for every kind of batch."""
    description, page_size, speculation = (
        plan.description,
        plan.geometry.page_size,
        plan.speculation,
    )
    capture_layers = speculation.capture_layers if speculation is not None else frozenset()
    max_nodes = speculation.config.max_nodes if speculation is not None and speculates else 0
    model = description.load_stage(
        plan.model_layers,
        numerics=backends.numerics,
        device=backends.device,
        capture_layers=capture_layers,
        digest=digest,
        ranks=ranks if ranks.own.size > 1 else None,
    )
    caches = StageCaches.of_layers(pools, plan.model_layers)
    runs_on = backends.of_stage(
        caches,
        description.attention_geometry(page_size),
        description.latent_geometry(page_size),
        max_nodes=max_nodes,
        num_scratch=plan.num_scratch,
    ).with_snapshots(caches)
    if backends.device != HOST:
        run_every_kind(
            build_executor(model, runs_on, backends.device, None),
            description.facts,
            capture_layers=capture_layers,
            max_nodes=max_nodes,
        )
    return model, runs_on


def _grammars(config: WorkerConfig, facts: ModelFacts) -> Grammars | None:
    if not config.placement.draws:
        return None
    return load_grammars(config.model, facts.eos_token_ids)


def max_frame_bytes(config: WorkerConfig, plan: StagePlan) -> int:
    """An upper bound for a batch between stages: hidden states (and three captured ones) and
    selected keys of a full chunk with its scores, tables of all rows, and per row everything
    sampling may carry (the tokens of the context, biases, bans, a grammar); and for what the ranks
    of a stage exchange."""
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
