"""The forwards of a stage that run as captured graphs, or as recordings on the host."""

import logging

import torch

from engine.assembly.backend_set import Capturable, StageBackends
from engine.contracts.model import StageModel
from engine.graphs.buckets import decode_buckets, extend_buckets, verify_buckets
from engine.graphs.host_steps import HostSteps
from engine.graphs.runner import StageGraphs
from engine.pipeline.stage_executor import LayerObserver
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.contracts.config import SpeculationConfig
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.replay.draft_graphs import DraftGraphs
from engine.speculative.replay.recorded_drafts import RecordedDrafts
from engine.speculative.replay.round_graphs import RoundGraphs
from engine.speculative.trees.tree_expander import TreeExpander
from models.loader import ModelDescription
from pool.stage.config import WorkerConfig
from pool.stage.speculation import CapturedDraft
from pool.stage.speculation_plan import DraftModelPlan

logger = logging.getLogger(__name__)


def build_graphs(
    config: WorkerConfig,
    description: ModelDescription,
    model: StageModel,
    backends: StageBackends,
    speculation: SpeculationConfig | None,
    observer: LayerObserver | None = None,
) -> StageGraphs | None:
    """Capture the decode and verify steps of up to `max_running` rows.

    Return None if graphs are disabled or not supported.

    Raises:
        ConfigError: a forward could not be captured; the message names its bucket.
    """
    parts = backends.capturable
    if parts is None or not config.cuda_graphs:
        return None
    if description.counts_on_host:
        logger.info("no graphs: the number of tokens per expert is read on the host")
        return None
    buckets = decode_buckets(config.max_running)
    if speculation is not None:
        buckets += verify_buckets(
            config.max_running, speculation.max_nodes, is_masked=speculation.topk > 1
        )
    graphs = StageGraphs(
        model=model,
        attention=parts.attention,
        recurrent=parts.recurrent,
        buckets=buckets,
        capture=parts.capture,
        device=parts.device,
        observer=observer,
    )
    graphs.capture_all()
    return graphs


def build_host_steps(
    config: WorkerConfig,
    description: ModelDescription,
    model: StageModel,
    backends: StageBackends,
    observer: LayerObserver | None,
) -> HostSteps | None:
    """Return recorded decode steps of up to `max_running` rows, and of whole prompt chunks.

    Each number of rows is recorded on first use. Return None if recordings are disabled, or if a
    step depends on more than its rows.
    """
    attention = backends.attention
    states = backends.states
    if (
        attention is None
        or states is None
        or not config.cuda_graphs
        or description.counts_on_host
        or config.placement.tensor.size > 1
    ):
        return None
    return HostSteps(
        model=model,
        attention=attention,
        recurrent=backends.recurrent,
        states=states,
        max_rows=config.max_running,
        chunk_tokens=config.chunk_tokens,
        observer=observer,
    )


def build_draft_graphs(
    config: WorkerConfig,
    parts: Capturable | None,
    plan: DraftModelPlan,
    model: DraftModel,
    attention: DraftAttention,
) -> CapturedDraft:
    """Capture the draft model's forwards and rounds for up to `max_running` rows.

    A round grows whole trees. On the host both are recorded instead, each number of rows on first
    use. Captures nothing if graphs are disabled or not supported.

    Raises:
        ConfigError: a forward could not be captured; the message names its bucket.
    """
    if not config.cuda_graphs or plan.draft.target.counts_on_host:
        return CapturedDraft()
    if attention.recordable_round is not None and plan.config.steps > 1:
        recorded = RecordedDrafts(
            model=model,
            attention=attention,
            rounds=attention.recordable_round,
            topk=plan.config.topk,
            steps=plan.config.steps,
            max_nodes=plan.config.max_nodes,
        )
        return CapturedDraft(recorded=recorded)
    if parts is None or attention.capturable is None:
        return CapturedDraft()
    (cache, *_) = model.cache_specs(config.page_size)
    dtype = getattr(torch, cache.dtype)
    follows = DraftGraphs(
        model=model,
        attention=attention.capturable,
        context=attention.on_pages,
        capture=parts.capture,
        buckets=extend_buckets(config.max_running, plan.config.max_nodes),
        width=plan.draft.hidden_size,
        dtype=dtype,
        device=parts.device,
    )
    follows.capture_all()
    if attention.capturable_round is None or plan.config.steps < 2:
        return CapturedDraft(follows)
    expander = TreeExpander(
        model=model, rounds=attention.round, context=attention.in_round, topk=plan.config.topk
    )
    rounds = RoundGraphs(
        expander=expander,
        rounds=attention.capturable_round,
        max_rows=config.max_running,
        steps=plan.config.steps,
        topk=min(plan.config.topk, model.vocab_size),
        capture=parts.capture,
        width=plan.draft.hidden_size,
        dtype=dtype,
        device=parts.device,
    )
    rounds.capture_all()
    return CapturedDraft(follows, rounds)
