"""`baton check`: whether a checkpoint can be served with these stages and ranks, and their memory.

It reads configs and the headers of weight files, and loads no weights. The model's blocks are built
without memory, so that missing, extra or misshapen tensors are reported as a worker would report
them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from engine.core.layer_range import LayerRange, TensorRank
from engine.core.numerics import Numerics
from engine.memory.budget import decode_requests, stage_costs
from engine.pipeline.ranks import StageRanks
from pool.stage.config import WorkerConfig
from pool.stage.plan import StagePlan, plan_stage
from pool.stage.pool_size import memory_of, resume_notice
from pool.stage.speculation_plan import DraftModelPlan
from runtime.config import load
from runtime.errors import BatonError
from runtime.gguf.convert import checkpoint_of
from runtime.model_files.config import read_config
from runtime.model_files.end_tokens import read_end_tokens
from runtime.model_files.model_folder import check_model_folder
from runtime.model_files.sampling import read_sampling_defaults
from runtime.process.host_memory import MIB, HostMemory
from runtime.process.standard_streams import open_to_all_text, whole_output

# Stands for another machine's memory: the size of the cache was given by a flag.
_ANY_MEMORY = HostMemory(1 << 62, 1 << 62)
_HEAD = (
    f"{'stage':>5}  {'layers':9}{'weights':>12}{'per token':>12}{'per request':>13}{'cache':>12}"
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def check(
    model: Annotated[Path, typer.Argument(help="Directory of the checkpoint.")],
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that share each stage.")] = 1,
    dp_attention: Annotated[
        int, typer.Option(help="Data ranks that share each stage's ranks.")
    ] = 1,
    ep: Annotated[
        int | None, typer.Option(help="Ranks that experts are spread over: as many as --tp.")
    ] = None,
    partition: Annotated[str, typer.Option(help='Layers per stage, like "3,5", or balanced.')] = "",
    weights: Annotated[str, typer.Option(help="model, int8 or int4: bits a weight.")] = "model",
    draft: Annotated[Path | None, typer.Option(help="Draft model, or suffix.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Directory of LoRA adapters.")] = None,
    memory_mb: Annotated[
        int | None, typer.Option(help="Cache memory per rank in MiB; default: as fits here.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output; default: the model's.")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Requests that compute at a time.")
    ] = None,
) -> None:
    """Report, without loading it, whether a model can be served, and the memory of each rank.

    The figures are those of a decode pool.
    """
    flags = {
        "world_size": pp * tp,
        "tp": tp,
        "dp_attention": dp_attention,
        "ep": ep,
        "partition": partition,
        "weights": weights,
        "draft": draft,
        "adapters": adapters,
        "memory_mb": memory_mb,
        "max_context": max_context,
        "max_running": max_running,
    }
    try:
        folder = checkpoint_of(model)
        check_model_folder(folder, flag="baton check")
        config = load(WorkerConfig, section="decode", flags=flags | {"model": folder})
        for line in report(config):
            print(line)
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def report(config: WorkerConfig) -> Iterator[str]:
    """Yield the lines to print.

    Raises:
        ConfigError: a worker with this configuration would not start; the message is the worker's.
    """
    memory = (lambda device: _ANY_MEMORY) if config.memory_mb else memory_of
    held = decode_requests(config.max_running, num_landing=config.max_landing)
    plan = plan_stage(config, max_held=held, speculates=config.draft is not None, memory=memory)
    own = config.placement.tensor
    facts = plan.description.facts
    stages = _checked_stages(plan, own)
    yield (
        f"{config.model.resolve().name}: {facts.architecture}, {facts.num_layers} layers, runs in {facts.dtype}, "
        f"stored as {_stored_types(plan)}"
    )
    if adapters := plan.description.adapters:
        yield f"adapters: {', '.join(adapter.name for adapter in adapters)}"
    yield _HEAD
    specs = [spec.of_rank(own.attention) for spec in plan.geometry.specs]
    for place, (stage, cost) in enumerate(
        zip(stages, stage_costs(specs, plan.ranges), strict=True)
    ):
        weights = plan.description.weight_bytes(stage, own) + _draft_bytes(
            plan, is_last=place + 1 == len(stages)
        )
        cache = plan.size.num_pages * cost.page_bytes + plan.size.num_slots * cost.slot_bytes
        yield (
            f"{place:>5}  {stage!s:9}{_size(weights):>12}{_size(cost.page_bytes / config.page_size):>12}"
            f"{_size(cost.slot_bytes):>13}{_size(cache):>12}"
        )
    if own.size > 1:
        yield f"of each of the {own.size} ranks of a stage" + (
            ", but only the first of each data rank of the last has the draft"
            if plan.has_draft_model
            else ""
        )
    num_pages = own.data_size * (plan.size.num_pages - 1)
    yield (
        f"{num_pages} pages of {config.page_size} tokens: room for {num_pages * config.page_size} tokens in all, "
        f"{plan.max_context_tokens} of one request"
    )
    yield from _of_answers(config.model, facts.vocab_size)
    yield from plan.notices
    if notice := resume_notice(config, facts.chunk_grid):
        yield f"as a prefill pool: {notice}"


def _of_answers(model: Path, vocab_size: int) -> Iterator[str]:
    """Yield what a router reads from the model's files: end tokens and default sampling."""
    ends = read_end_tokens(model, read_config(model), vocab_size)
    sampling = read_sampling_defaults(model)
    yield f"end tokens: {ends}"
    yield f"the model's own sampling: {sampling}"
    yield from (notice for notice in (ends.notice, sampling.notice) if notice)


def _checked_stages(plan: StagePlan, own: TensorRank) -> list[LayerRange]:
    """Return the model's layers by stage.

    Raises:
        ConfigError: tensors do not fit the config or this rank.
    """
    nowhere = torch.device("meta")
    whole = LayerRange(0, plan.description.facts.num_layers)
    stages = [layers.intersect(whole) for layers in plan.ranges]
    for layers in stages:
        plan.description.load_stage(
            layers,
            numerics=Numerics.FAST,
            device=nowhere,
            ranks=StageRanks(own) if own.size > 1 else None,
        )
    if isinstance(plan.speculation, DraftModelPlan):
        draft = plan.speculation.draft
        (draft.load_frozen if draft.is_frozen else draft.load_layers)(
            numerics=Numerics.FAST, device=nowhere
        )
    return stages


def _stored_types(plan: StagePlan) -> str:
    """Return the dtypes of the stored tensors, as the files name them."""
    entries = {} if plan.description.checkpoint is None else plan.description.checkpoint.entries
    return ", ".join(sorted({part.dtype for entry in entries.values() for part in entry.stored}))


def _draft_bytes(plan: StagePlan, *, is_last: bool) -> int:
    return plan.speculation.weight_bytes if is_last and plan.speculation is not None else 0


def _size(num_bytes: float) -> str:
    if not num_bytes:
        return "-"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.1f} KiB"


if __name__ == "__main__":
    open_to_all_text()
    with whole_output("baton check"):
        app(prog_name="baton check")
