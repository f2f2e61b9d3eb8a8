"""The settings that the stages of a pool must share, sent at joining and compared by the leader."""

from collections.abc import Sequence

import llvmlite
import numpy as np
import torch

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.kernels.host.linear.packed_linear import arithmetic_class
from engine.pipeline.records import LAYOUT
from models.loader import ModelDescription
from pool.stage.config import WorkerConfig
from pool.stage.pool_size import PoolSize
from pool.stage.speculation_plan import SpeculationPlan
from runtime.model_files.tokenizer_files import tokenizer_digest

ANY = "any"  # no bits are promised
MODELS_OWN = "the model's"  # no other limit was set
NONE = "none"


def stage_settings(
    config: WorkerConfig,
    description: ModelDescription,
    ranges: Sequence[LayerRange],
    size: PoolSize,
    *,
    max_held: int,
    speculation: SpeculationPlan | None,
    speculates: bool,
) -> dict[str, str]:
    """Return the settings by readable name, each value as text.

    A stage that differed in one of them would compute other bits, match a grammar against other
    tokens, or receive a batch that its memory cannot hold.
    """
    kind = config.device.partition(":")[0]
    exact = Numerics(config.numerics) is Numerics.EXACT
    settings = {
        "architecture": description.facts.architecture,
        "checkpoint": description.facts.revision,
        "numerics": config.numerics,
        "weights": config.weights,
        "arithmetic": _arithmetic() if exact else ANY,
        "device": kind,
        "page_size": str(config.page_size),
        "num_pages": str(size.num_pages),
        "num_slots": str(size.num_slots),
        "max_held": str(max_held),
        "max_context": str(config.max_context or MODELS_OWN),
        "max_context_tokens": str(size.context_tokens),
        "chunk_tokens": str(config.chunk_tokens),
        "partition": ", ".join(map(str, ranges)),
        "tp": str(config.tp),
        "dp_attention": str(config.dp_attention),
        "overlap_tokens": str(config.overlap_tokens),
        "tokenizer": tokenizer_digest(config.model),
        "eos_token_ids": _listed(description.facts.eos_token_ids),
        "draft": NONE
        if speculation is None
        else speculation.revision or str(speculation.config.draft),
        "frames": LAYOUT,
    }
    settings |= dict.fromkeys(config.tiers, "yes")
    if description.adapter_bytes is not None:
        settings["adapter_bytes"] = str(description.adapter_bytes)
    if speculation is not None:
        settings |= {
            "spec_topk": str(config.spec_topk),
            "spec_steps": str(config.spec_steps),
            "spec_draft_tokens": str(config.spec_draft_tokens),
            "spec_prompt": str(speculation.handed),
            "verifies drafts": str(speculates),
            "max_running": str(config.max_running),
        }
    return settings


def _listed(ids: Sequence[int]) -> str:
    return " ".join(map(str, sorted(ids))) or NONE


def _arithmetic() -> str:
    """Return what bits depend on, in addition to weights and inputs.

    These are the kernels' class of arithmetic and the library releases. Libraries choose other
    instructions on another CPU, and may do so in another release.
    """
    torch_release = torch.__version__.partition("+")[0]
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{arithmetic_class()} torch-{torch_release}-{capability.lower()} numpy-{np.__version__} "
        f"llvm-{llvmlite.__version__}"
    )
