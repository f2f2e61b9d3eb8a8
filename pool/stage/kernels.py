"""Compilation of a stage's kernels before it loads its weights.

Otherwise they would be compiled one by one while the pool waits for its first token.
"""

import torch

from engine.core.numerics import HOST, WeightFormat
from engine.kernels.host.aot.kernel_list import ModelNeeds, kernels_of
from engine.kernels.host.aot.precompile import compile_ahead
from engine.memory.layout import CacheKind
from pool.stage.config import WorkerConfig
from pool.stage.plan import StagePlan


def compile_kernels(config: WorkerConfig, plan: StagePlan, *, reads_prompts: bool) -> None:
    """Compile the host kernels of a stage. A device compiles its kernels during warm-up."""
    if config.device == HOST.type:
        compile_ahead(list(kernels_of(_needs(config, plan, reads_prompts=reads_prompts))))


def _needs(config: WorkerConfig, plan: StagePlan, *, reads_prompts: bool) -> ModelNeeds:
    kinds = {spec.kind for spec in plan.geometry.local_specs()}
    return ModelNeeds(
        getattr(torch, plan.description.facts.dtype),
        reads_prompts,
        attends=bool(kinds & {CacheKind.KV, CacheKind.WINDOW}),
        attends_latent=CacheKind.LATENT in kinds,
        selects_keys=CacheKind.INDEX_KEY in kinds,
        has_states=CacheKind.STATE in kinds,
        weight_format=WeightFormat(config.weights),
    )
