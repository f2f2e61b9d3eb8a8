"""Sides of `bench.engine` and `bench.coded_weights`: `python -m
bench.engine_sides ours|reference`.

Each side is a process. It reads one JSON command per line and responds with one line. {"do":
"prefill", "tokens": n} returns the seconds for the first n tokens of a prompt (default: all) and
the first logits. {"do": "begin", "rows": n} puts n prompts into the cache. {"do": "decode",
"steps": n} continues from there and returns the seconds of each step.
"""

import argparse
import itertools
import json
import sys
import time
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics, WeightFormat
from engine.core.request import SamplingParams
from engine.graphs.host_steps import HostSteps
from engine.memory.heap import keep_freed_memory
from engine.memory.layout import PoolGeometry
from engine.memory.leases import pages_for_tokens
from engine.memory.pools import StagePools
from engine.pipeline.stage_executor import StageExecutor
from models.blocks.random_weights import RandomWeights
from models.loader import ModelDescription, random_model
from pool.stage.config import WorkerConfig

VOCAB_SIZE = 151936
NUM_SHOWN_LOGITS = 1000
MODEL: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}


class Side(Protocol):
    def prefill(self, prompts: Tensor) -> tuple[float, Tensor]:
        """Prefill prompts [1, n] into an empty cache, up to the choice of a token.

        Return the seconds and the logits of that token.
        """
        ...

    def begin(self, prompts: Tensor) -> None:
        """Drop everything, prefill prompts [rows, n], and choose each row's next token."""
        ...

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of each of the next steps of all rows."""
        ...


class Ours:
    """A worker's steps without scheduling: build the batch, plan, forward, argmax.

    The pages of a row are scattered in the pool.
    """

    def __init__(
        self,
        description: ModelDescription,
        *,
        numerics: Numerics,
        page_size: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        keep_freed_memory()
        layers = LayerRange(0, description.facts.num_layers)
        pages_per_row = pages_for_tokens(max_tokens, page_size)
        num_pages = 1 + max_rows * pages_per_row
        pools = StagePools(
            PoolGeometry(
                page_size=page_size,
                num_pages=num_pages,
                num_slots=1,
                layers=layers,
                specs=description.cache_specs(page_size),
            )
        )
        geometry = description.attention_geometry(page_size)
        assert geometry is not None
        model = self.model = description.load_stage(layers, numerics=numerics)
        attention = CpuAttention(kv_pools=pools.kv, geometry=geometry)
        recurrent = CpuRecurrent(conv_pools=pools.conv, state_pools=pools.state, numerics=numerics)
        steps = HostSteps(
            model=model,
            attention=attention,
            recurrent=recurrent,
            states=recurrent,
            max_rows=max_rows,
            chunk_tokens=WorkerConfig.model_fields["chunk_tokens"].default,
        )
        self._stage = StageExecutor(
            model=model, attention=attention, recurrent=recurrent, graphs=steps
        )
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._tables = order.view(max_rows, pages_per_row).int()
        self._tokens = torch.empty(0, 1)
        self._num_cached = 0
        self.adapters: tuple[str, ...] = ()  # of the rows; empty: no row has one

    def prefill(self, prompts: Tensor) -> tuple[float, Tensor]:
        started = time.perf_counter()
        logits = self._forward(0, prompts, 0)
        logits.argmax(-1)
        return time.perf_counter() - started, logits[0]

    def begin(self, prompts: Tensor) -> None:
        logits = [self._forward(row, prompts[row : row + 1], 0) for row in range(len(prompts))]
        self._tokens = torch.cat(logits).argmax(-1, keepdim=True)
        self._num_cached = prompts.shape[1]

    def decode(self, steps: int) -> list[float]:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            self._tokens = self._forward(0, self._tokens, self._num_cached).argmax(-1, keepdim=True)
            self._num_cached += 1
            stamps.append(time.perf_counter())
        return _intervals(stamps)

    @torch.inference_mode()
    def _forward(self, first_row: int, token_ids: Tensor, context: int) -> Tensor:
        """Run token_ids [rows, n] after `context` tokens a row; return logits [rows, vocab]."""
        rows, length = token_ids.shape
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if length == 1 else ForwardMode.PREFILL,
            request_keys=tuple(range(first_row, first_row + rows)),
            query_lens=(length,) * rows,
            context_lens=(context,) * rows,
            token_ids=token_ids.flatten(),
            positions=torch.arange(context, context + length).repeat(rows),
            page_tables=self._tables[first_row : first_row + rows],
            slot_ids=torch.zeros(rows, dtype=torch.int32),
            sampling=(SamplingRow(SamplingParams(temperature=0.0), position=context + length),)
            * rows,
            adapters=self.adapters[first_row : first_row + rows],
        )
        logits = self._stage.run(batch).logits
        assert logits is not None
        return logits


class _Stamps(StoppingCriteria):
    """Criterion that never stops; it records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Reference:
    """transformers with the same weights: `generate`, greedy, static cache."""

    def __init__(self, *, max_tokens: int) -> None:
        config = Qwen3Config.from_dict(MODEL)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # noqa: SLF001
        self._model = model.eval()
        self._max_tokens = max_tokens
        source = RandomWeights(seed=0)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                source.read(name.removeprefix("model."), parameter.data)
        self._ids, self._cache = torch.empty(0, 0, dtype=torch.long), self._new_cache()

    def prefill(self, prompts: Tensor) -> tuple[float, Tensor]:
        self._ids, self._cache = prompts, self._new_cache()
        started = time.perf_counter()
        _, logits = self._generate(1)
        return time.perf_counter() - started, logits[0]

    def begin(self, prompts: Tensor) -> None:
        self._ids, self._cache = prompts, self._new_cache()
        self._generate(1)

    def decode(self, steps: int) -> list[float]:
        return _intervals(
            self._generate(steps + 1)[0]
        )  # the time before the first token includes more than the step

    def _new_cache(self) -> StaticCache:
        return StaticCache(config=self._model.config, max_cache_len=self._max_tokens)

    @torch.inference_mode()
    def _generate(self, num_tokens: int) -> tuple[list[float], Tensor]:
        """Continue the ids, of which the cache may hold a prefix.

        Return the time of each new token, and the logits of the last one.
        """
        stamps = _Stamps()
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            disable_compile=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        out = self._model.generate(
            self._ids,
            generation_config=settings,
            past_key_values=self._cache,
            attention_mask=torch.ones_like(self._ids),
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        self._ids = out.sequences
        return stamps.times, out.logits[-1]


def _intervals(stamps: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(stamps)]


def serve(side: Side, prompts: Tensor, row_context: int) -> None:
    """Run commands until the input ends; decoded rows follow `row_context` tokens each."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, object] = {}
        if command["do"] == "prefill":
            seconds, logits = side.prefill(prompts[:1, : command.get("tokens")])
            answer = {"seconds": [seconds], "logits": logits[:NUM_SHOWN_LOGITS].tolist()}
        elif command["do"] == "begin":
            side.begin(prompts[: command["rows"], :row_context])
        else:
            answer = {"seconds": side.decode(command["steps"])}
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("ours", "reference"))
    parser.add_argument("--weights", type=WeightFormat, default=WeightFormat.MODEL)
    parser.add_argument("--numerics", type=Numerics, default=Numerics.EXACT)
    for name in ("threads", "context", "max-tokens", "page-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument(
        "--row-context", type=int, help="context of each row; default: the whole context"
    )
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    prompts = torch.randint(
        VOCAB_SIZE, (flags.rows, flags.context), generator=torch.Generator().manual_seed(1)
    )
    side: Side
    if flags.side != "reference":
        side = Ours(
            replace(random_model(MODEL), weight_format=flags.weights),
            numerics=flags.numerics,
            page_size=flags.page_size,
            max_tokens=flags.max_tokens,
            max_rows=flags.rows,
        )
    else:
        side = Reference(max_tokens=flags.max_tokens)
    serve(side, prompts, flags.row_context or flags.context)


if __name__ == "__main__":
    main()
