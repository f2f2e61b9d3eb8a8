"""One pipeline stage in a process: its model layers, pools, backends and transfer agent."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.assembly.backend_set import Backends, StageBackends, StageCaches, build_executor
from engine.contracts.model import ModelFacts, StageModel
from engine.core.numerics import HOST, Numerics
from engine.graphs.runner import Replays
from engine.memory.cache_memory import allocate_in_background
from engine.memory.heap import keep_freed_memory
from engine.memory.pools import StagePools
from engine.pipeline.overlap import Overlap
from engine.pipeline.ranks import StageRanks
from engine.pipeline.stage_executor import LayerObserver, StageExecutor
from engine.speculative.contracts.drafter import Drafter, PoolDrafter
from models.decoder import EMBEDDING, DecoderStage
from models.weights_digest import StageDigests, WeightsDigest
from pool.stage.adapters import LoadedAdapters
from pool.stage.backends import choose_backends
from pool.stage.config import WorkerConfig
from pool.stage.graphs import build_draft_graphs, build_graphs, build_host_steps
from pool.stage.handoff import LayerMark, build_agent, layer_mark
from pool.stage.metrics import StageCounts, stage_counts
from pool.stage.plan import StagePlan
from pool.stage.speculation import build_drafter, role_drafter
from pool.stage.speculation_plan import DraftModelPlan
from pool.stage.tiers import StageTiers, open_tiers
from pool.stage.transports import TRANSPORTS, make_transport
from pool.stage.warmup import run_every_kind
from runtime.grammar import Grammars, load_grammars
from runtime.process.host_memory import MIB
from runtime.process.start_progress import WEIGHTS
from transfer.agent.agent import TransferAgent
from transfer.plan.handoff_terms import StageSessionEvent
from transfer.transport.device import Route
from transfer.transport.refusals import RefusalReason

logger = logging.getLogger(__name__)

COPIED = (EMBEDDING,)  # tensors that several stages may read


@dataclass(frozen=True)
class Stage:
    """The parts of a running stage, or of one rank of it.

    `ranks` has no channel before the pool has formed.
    """

    plan: StagePlan
    pools: StagePools
    executor: StageExecutor
    agent: TransferAgent
    drafter: Drafter | None = None  # on the last stage of a pool that speculates
    ranks: StageRanks = field(default_factory=StageRanks)
    counts: StageCounts = field(default_factory=StageCounts)
    grammars: Grammars | None = None  # on the ranks that sample
    device: torch.device = HOST
    weights: StageDigests = field(default_factory=StageDigests)
    # Digests of tensors that later stages may copy, by name.
    counted: Mapping[str, str] = field(default_factory=dict)
    adapters: LoadedAdapters | None = None  # None if the pool takes none
    tiers: StageTiers = field(default_factory=StageTiers)  # of the prefix cache


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
    """Load the stage's tensors and start its transfer agent.

    `observe_layers(agent, mark)` returns the observer of computed layers: on the sending side it
    reports to the agent, on the receiving side there is none. `on_refused` is called with the
    reason for each rejected handoff message.
    """
    keep_freed_memory()
    torch.set_num_threads(config.threads)
    backends = choose_backends(config.device, Numerics(config.numerics), plan.description)
    device, speculation = backends.device, plan.speculation
    pools = StagePools(plan.geometry, device=str(device))
    digest, draft_digest, place = WeightsDigest(), WeightsDigest(), config.placement
    overlap = Overlap(config.overlap_tokens) if config.overlap_tokens else None
    ranks = StageRanks(
        place.tensor,
        stage=place.pipeline_rank,
        step_limit_s=config.step_limit_s,
        while_under_way=overlap.pass_turn if overlap is not None else lambda: None,
    )
    model, runs_on = _load_layers(plan, pools, backends, digest, ranks, speculates=speculates)
    agent = _agent(config, pools, device, incarnation, on_event=on_event, on_refused=on_refused)
    observer = observe_layers(agent, layer_mark(device))
    graphs = _build_replays(config, plan, model, runs_on, device, observer, decodes=speculates)
    executor = build_executor(model, runs_on, device, observer, graphs, overlap)
    drafter: PoolDrafter | None = None
    reader: Drafter | None = None
    if isinstance(speculation, DraftModelPlan) and place.samples:
        parts = runs_on.capturable if speculates else None
        capture = partial(build_draft_graphs, config, parts, speculation)
        drafter = build_drafter(speculation, pools, backends, capture, digest, draft_digest)
        reader = role_drafter(speculation, drafter, observer, speculates=speculates)
    grammars, tiers = _grammars(config, plan.description.facts), open_tiers(config, pools, device)
    agent.start()  # last, so that an error above leaves no thread running
    if device == HOST:
        allocate_in_background(pools.tensors())
    return Stage(
        plan,
        pools,
        executor,
        agent,
        reader,
        ranks,
        stage_counts(executor, drafter),
        grammars,
        device,
        _stage_weights(digest, draft_digest, is_first=place.pipeline_rank == 0),
        digest.of(COPIED),
        _adapters(config, plan, model, executor),
        tiers,
    )


def _adapters(
    config: WorkerConfig, plan: StagePlan, model: DecoderStage, executor: StageExecutor
) -> LoadedAdapters | None:
    if config.adapters is None:
        return None
    return LoadedAdapters(config.adapters, plan.description, model, executor.forget_adapter)


def _agent(
    config: WorkerConfig,
    pools: StagePools,
    device: torch.device,
    incarnation: str,
    *,
    on_event: Callable[[StageSessionEvent], None],
    on_refused: Callable[[RefusalReason], object],
) -> TransferAgent:
    """Return the transfer agent of the pools; it is not started."""
    transport = make_transport(config, on_refused)
    reaches_devices = TRANSPORTS[config.transport].reaches_devices
    route = Route.DIRECT if reaches_devices else Route.PINNED
    return build_agent(
        pools, device, transport, incarnation=incarnation, on_event=on_event, route=route
    )


def _build_replays(
    config: WorkerConfig,
    plan: StagePlan,
    model: StageModel,
    runs_on: StageBackends,
    device: torch.device,
    observer: LayerObserver | None,
    *,
    decodes: bool,
) -> Replays | None:
    """Record the steps of a stage on the host, or capture its decode steps on a device."""
    if device == HOST:
        return build_host_steps(config, plan.description, model, runs_on, observer)
    if not decodes:
        return None
    speculation = plan.speculation.config if plan.speculation is not None else None
    return build_graphs(config, plan.description, model, runs_on, speculation, observer)


def _stage_weights(
    digest: WeightsDigest, draft_digest: WeightsDigest, *, is_first: bool
) -> StageDigests:
    """Return the digests of the stage's weights.

    The embedding counts on the stage that looks tokens up. It is a copy on a stage that uses it as
    a head or for a draft model.
    """
    copies = () if is_first else COPIED
    return StageDigests(digest.total(without=copies), digest.of(copies), draft_digest.total())


def _load_layers(
    plan: StagePlan,
    pools: StagePools,
    backends: Backends,
    digest: WeightsDigest,
    ranks: StageRanks,
    *,
    speculates: bool,
) -> tuple[DecoderStage, StageBackends]:
    """Load the target model's layers of this stage and their backends, for every kind of batch."""
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
        report=lambda done, total: logger.info(WEIGHTS, done // MIB, total // MIB),
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
    if not config.placement.samples:
        return None
    return load_grammars(config.model, facts.eos_token_ids)
