"""`python -m bench.gpu_model`: whole models on a GPU against the machine's own ceilings.

The models are an 8B-shaped Llama and a 9B-shaped Qwen3.5 hybrid, with random bf16 weights made on
the device. The ceilings are measured in the same run. Decode and verification are compared with a
device copy of the bytes they must read (weights once, and every row's cache), prefill with a large
matrix product. A step begins with a batch on the host, which is planned, and ends with logits on
the device. Decode steps are captured as in a decode pool. A case that does not fit into memory is
null. transformers is measured for decode if it can be imported. Each part is reported when it is
complete. A part that fails is reported as an error, and the next one runs.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu import Ceilings, ceilings, seconds
from bench.gpu_configs import HYBRID_9B, LLAMA_8B
from bench.report import Value, render
from engine.assembly.backend_set import Backends, StageBackends, StageCaches, build_executor
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.draft_trees import SpecRow
from engine.core.layer_range import LayerRange
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import PoolGeometry, bytes_per_page, bytes_per_slot
from engine.memory.pools import StagePools
from engine.pipeline.stage_executor import StageExecutor
from models.blocks.weights import Weights
from models.decoder import DecoderStage
from models.loader import ModelDescription, random_model
from pool.stage.config import WorkerConfig
from pool.stage.graphs import build_graphs
from runtime.errors import BatonError, ConfigError
from testing.batches import unmarked

PAGE = 64
_SHARE_OF_FREE = 0.8  # the rest is for activations and graphs
Stopwatch = Callable[[Callable[[], object]], float]  # seconds per call
_SAMPLED = SamplingRow(SamplingParams(), 0)


@dataclass(frozen=True)
class Sizes:
    """Measured sizes: rows and contexts of decode, prompt lengths, rows under verification."""

    rows: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (1024, 8192)
    prompts: tuple[int, ...] = (2048, 8192)
    nodes: tuple[int, ...] = (5, 16)

    @property
    def num_pages(self) -> int:
        """Return the pages of the largest batch, including the null page."""
        return max(max(self.rows) * _pages(max(self.contexts) + 1), _pages(max(self.prompts))) + 1


class DeviceRandom:
    """`WeightSource` that generates on the device; the host would take minutes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._generators: dict[torch.device, torch.Generator] = {}

    def has(self, name: str) -> bool:
        return ".experts." not in name or name.rsplit(".", 1)[1] == "weight"

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        """Implement `WeightSource.read`."""
        if "embed_tokens" not in name:  # a step reads one row of it per token
            self.num_bytes += out.nbytes
        if "norm" in name:
            out.fill_(1.0)
            return
        generator = self._generators.setdefault(
            out.device, torch.Generator(out.device).manual_seed(0)
        )
        out.normal_(0.0, out.shape[-1] ** -0.5, generator=generator)

    def row_scales(self, name: str, *, item: int | None = None) -> None:
        """Implement `WeightSource.row_scales`."""


@dataclass(frozen=True)
class Subject:
    """Whole model in one stage.

    `weight_bytes` is what every step reads. `verifier` has the memory of one row, because states
    are kept per node.
    """

    description: ModelDescription
    executor: StageExecutor
    verifier: StageExecutor
    weight_bytes: int
    num_pages: int

    def step(
        self, mode: ForwardMode, num_rows: int, length: int, context: int
    ) -> Callable[[], Tensor] | None:
        """Return a forward of equal rows, which ends with logits on the device.

        Tokens under verification are chains. None if there are too few pages.
        """
        spec = (
            SpecRow(tuple(range(-1, length - 1)), scratch=1) if mode is ForwardMode.VERIFY else None
        )
        each = _pages(context + length)
        if num_rows * each >= self.num_pages:
            return None
        rows = [
            Row(
                row,
                [7] * length,
                context,
                range(1 + row * each, 1 + (row + 1) * each),
                1 + row,
                _SAMPLED,
                spec,
            )
            for row in range(num_rows)
        ]
        batch = build_batch(mode, rows)
        executor = self.executor if spec is None else self.verifier

        def run() -> Tensor:
            fresh = unmarked(batch)
            fresh.spec_info = batch.spec_info
            logits = executor.run(fresh).logits
            assert logits is not None
            return logits

        return run

    def cache_bytes(self, context: int) -> int:
        """Return the bytes of a row's caches: pages of its tokens, and states, read and written."""
        specs = self.description.cache_specs(PAGE)
        return sum(
            spec.record_bytes * context // PAGE if spec.kind.is_paged else 2 * spec.record_bytes
            for spec in specs
        )

    def prefill_flops(self, length: int) -> float:
        """Return the FLOPs of products with the weights and of causal attention; one token for the
        head."""
        geometry = self.description.attention_geometry(PAGE)
        assert geometry is not None
        facts = self.description.facts
        num_attention = len(
            {spec.layer_id for spec in self.description.cache_specs(PAGE) if spec.kind.is_paged}
        )
        weights = self.weight_bytes / 2 - facts.vocab_size * facts.hidden_size
        return (
            2 * weights * length
            + 2 * geometry.num_heads * geometry.head_dim * length**2 * num_attention
        )


def build(config: dict[str, object], backends: Backends, sizes: Sizes) -> Subject:
    description, source = random_model(config), DeviceRandom()
    layers, page_bytes = (
        LayerRange(0, description.facts.num_layers),
        bytes_per_page(description.cache_specs(PAGE)),
    )
    weights = Weights(
        source,
        prefix="",
        dtype=getattr(torch, description.facts.dtype),
        numerics=backends.numerics,
        device=backends.device,
    )
    model = DecoderStage(
        facts=description.facts, spec=description.spec, layer_range=layers, weights=weights
    )

    def backends_over(num_pages: int, num_slots: int, max_nodes: int) -> StageBackends:
        pools = StagePools(
            PoolGeometry(PAGE, num_pages, num_slots, layers, description.cache_specs(PAGE)),
            device=str(backends.device),
        )
        return backends.of_stage(
            StageCaches.of_layers(pools, layers),
            description.attention_geometry(PAGE),
            description.latent_geometry(PAGE),
            max_nodes=max_nodes,
            num_scratch=2 if max_nodes else 0,
        )

    num_slots = max(sizes.rows) + 1
    few = backends_over(_pages(min(sizes.contexts) + max(sizes.nodes)) + 1, 2, max(sizes.nodes))
    fitting = _free_bytes(backends.device) - num_slots * bytes_per_slot(
        description.cache_specs(PAGE)
    )
    num_pages = min(sizes.num_pages, int(fitting * _SHARE_OF_FREE) // page_bytes)
    many = backends_over(num_pages, num_slots, 0)
    graphs = build_graphs(
        WorkerConfig(model=Path(), max_running=max(sizes.rows)), description, model, many, None
    )
    return Subject(
        description,
        build_executor(model, many, backends.device, None, graphs),
        build_executor(model, few, backends.device, None),
        source.num_bytes,
        num_pages,
    )


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30


def decode(subject: Subject, limits: Ceilings, sizes: Sizes, clock: Stopwatch) -> dict[str, Value]:
    """Return milliseconds per step, and the share of the copy ceiling."""
    values: dict[str, Value] = {}
    for context in sizes.contexts:
        for rows in sizes.rows:
            step, name = (
                subject.step(ForwardMode.DECODE, rows, 1, context),
                f"decode_b{rows}_c{context}",
            )
            took = None if step is None else clock(step)
            read = subject.weight_bytes + rows * subject.cache_bytes(context)
            values[f"{name}_ms"] = None if took is None else took * 1e3
            values[f"{name}_of_copy"] = None if took is None else read / took / limits.copy_bps
    return values


def prefill(subject: Subject, limits: Ceilings, sizes: Sizes, clock: Stopwatch) -> dict[str, Value]:
    """Return milliseconds per prompt, and the share of the matrix ceiling."""
    values: dict[str, Value] = {}
    for length in sizes.prompts:
        step = subject.step(ForwardMode.PREFILL, 1, length, 0)
        took = None if step is None else clock(step)
        values[f"prefill_{length}_ms"] = None if took is None else took * 1e3
        values[f"prefill_{length}_of_matmul"] = (
            None if took is None else subject.prefill_flops(length) / took / limits.matmul_flops
        )
    return values


def verify(subject: Subject, sizes: Sizes, clock: Stopwatch) -> dict[str, Value]:
    """Return the cost of verifying a chain, in steps of one row that are not captured either."""
    context = min(sizes.contexts)
    plain, *others = (
        subject.step(ForwardMode.VERIFY, 1, nodes, context) for nodes in (1, *sizes.nodes)
    )
    if plain is None:
        return {}
    took = clock(plain)
    return {
        f"verify_{nodes}_of_step": None if step is None else clock(step) / took
        for nodes, step in zip(sizes.nodes, others, strict=True)
    }


def reference(
    config: dict[str, object], device: torch.device, sizes: Sizes, clock: Stopwatch
) -> dict[str, Value]:
    """Return transformers' time for one token of one row after the shortest context.

    Empty if transformers is not installed.
    """
    if find_spec("transformers") is None:
        return {}
    import transformers

    known, kind = transformers.CONFIG_MAPPING, str(config["model_type"])
    if kind not in known:
        return {}
    settings = known[kind].from_dict(dict(config))
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            settings, dtype=torch.bfloat16
        ).eval()
    context = min(sizes.contexts)
    with torch.inference_mode():
        cache = model(
            torch.full((1, context), 7, device=device), use_cache=True, logits_to_keep=1
        ).past_key_values
        took = clock(
            lambda: model(
                torch.full((1, 1), 7, device=device), past_key_values=cache, use_cache=True
            )
        )
    return {f"transformers_b1_c{context}_ms": took * 1e3}


def measure(
    config: dict[str, object],
    backends: Backends,
    limits: Ceilings,
    sizes: Sizes,
    clock: Stopwatch,
    tell: Callable[[dict[str, Value]], None],
) -> None:
    """Measure all parts of one model, then transformers after the memory is free."""

    def attempt(part: str, work: Callable[[], dict[str, Value]]) -> None:
        try:
            values = work()
        except Exception as error:  # noqa: BLE001 - out of memory or a failed kernel ends its part only
            values = {"error": f"{type(error).__name__}: {error}"}
        tell({"part": part, **values})

    subjects = list[Subject]()

    def weights() -> dict[str, Value]:
        subjects.append(build(config, backends, sizes))
        return {"weight_gb": subjects[0].weight_bytes / 1e9, "num_pages": subjects[0].num_pages}

    attempt("weights", weights)
    if subjects:
        attempt("decode", lambda: decode(subjects[0], limits, sizes, clock))
        attempt("prefill", lambda: prefill(subjects[0], limits, sizes, clock))
        attempt("verify", lambda: verify(subjects[0], sizes, clock))
    subjects.clear()
    _free_what_is_unused()
    attempt("transformers", lambda: reference(config, backends.device, sizes, clock))
    _free_what_is_unused()


def _free_what_is_unused() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one per part")
    arguments = parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise ConfigError("bench.gpu_model needs a CUDA device", field="device")
        from engine.assembly.cuda import DeviceBackends

        device = torch.device("cuda", 0)
        backends, limits, sizes = DeviceBackends.on(device), ceilings(device), Sizes()

        def tell(values: Mapping[str, Value], **model: Value) -> None:
            print(render("gpu_model", {**model, **values}, as_json=arguments.json), flush=True)

        tell(
            {
                "gpu": torch.cuda.get_device_name(device),
                "torch": torch.__version__,
                "copy_gbps": limits.copy_bps / 1e9,
                "matmul_tflops": limits.matmul_flops / 1e12,
            }
        )
        _free_what_is_unused()
        for name, config in (("llama_8b", LLAMA_8B), ("hybrid_9b", HYBRID_9B)):
            measure(config, backends, limits, sizes, seconds, partial(tell, model=name))
    except BatonError as error:
        sys.exit(
            f"error: {error}"
            if not arguments.json
            else json.dumps({"bench": "gpu_model", "error": str(error)})
        )


if __name__ == "__main__":
    main()
