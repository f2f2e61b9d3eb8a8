"""The two sides of `bench.engine` and the measuring between them."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from bench.engine_reference import Reference
from bench.report import Value
from engine.attention.cpu import CpuAttention
from engine.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.memory.layout import PoolGeometry
from engine.memory.pages import pages_for_tokens
from engine.memory.pools import StagePools
from engine.model import ForwardContext
from engine.numerics import Numerics
from engine.recurrent.cpu import CpuRecurrent
from engine.request import SamplingParams
from engine.stages import LayerRange
from models.loader import random_model

MODEL: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "hidden_size": 1024,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1e6,
}
MAX_ROWS = 8
T = TypeVar("T")


class OurSide:
    """A worker's step without its scheduler, over rows whose pages are scattered in the pool."""

    def __init__(self, *, numerics: Numerics, page_size: int, max_tokens: int) -> None:
        description = random_model(MODEL)
        layers = LayerRange(0, description.facts.num_layers)
        pages_per_row = pages_for_tokens(max_tokens, page_size)
        num_pages = 1 + MAX_ROWS * pages_per_row
        pools = StagePools(PoolGeometry(page_size=page_size, num_pages=num_pages, num_slots=1, layers=layers,
                                        specs=description.cache_specs(page_size)))
        geometry = description.attention_geometry(page_size)
        assert geometry is not None
        self._model = description.load_stage(layers, numerics=numerics)
        self._attention = CpuAttention(kv_pools=pools.kv, geometry=geometry, numerics=numerics)
        self._context = ForwardContext(
            attention=self._attention,
            recurrent=CpuRecurrent(conv_pools=pools.conv, state_pools=pools.state, numerics=numerics),
        )
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._tables = order.view(MAX_ROWS, pages_per_row).int()

    @torch.inference_mode()
    def step(self, first_row: int, token_ids: Tensor, context: int) -> Tensor:
        """Run token_ids [rows, n] behind `context` tokens of each row. Returns the rows' logits [rows, vocab]."""
        rows, length = token_ids.shape
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if length == 1 else ForwardMode.PREFILL,
            request_ids=tuple(range(first_row, first_row + rows)),
            query_lens=(length,) * rows,
            context_lens=(context,) * rows,
            token_ids=token_ids.flatten(),
            positions=torch.arange(context, context + length).repeat(rows),
            page_tables=self._tables[first_row : first_row + rows],
            slot_ids=torch.zeros(rows, dtype=torch.int32),
            sampling=(SamplingRow(SamplingParams(temperature=0.0), position=context + length),) * rows,
        )
        self._attention.plan(batch)
        logits = self._model.forward(batch, None, self._context).logits
        assert logits is not None
        return logits


@dataclass
class Case:
    """Seconds per step of one case, a list per round and side."""

    name: str
    tokens_per_step: int
    ours: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)

    def add(self, ours: list[float], reference: list[float]) -> None:
        self.ours.append(ours)
        self.reference.append(reference)
        print(f"{self.name}: {median(ours) * 1e3:.0f} ms, reference {median(reference) * 1e3:.0f} ms", file=sys.stderr)

    def report(self) -> dict[str, Value]:
        def rate(rounds: list[list[float]]) -> float:
            return round(self.tokens_per_step / median(seconds for one in rounds for seconds in one), 2)

        ratios = [median(theirs) / median(ours) for ours, theirs in zip(self.ours, self.reference, strict=True)]
        return {f"{self.name}_tokens_per_s": rate(self.ours),
                f"{self.name}_reference_tokens_per_s": rate(self.reference),
                f"{self.name}_ratio": round(median(ratios), 3)}


class EngineBench:
    def __init__(self, *, threads: int, rounds: int, steps: int, context: int, page_size: int, numerics: str) -> None:
        torch.set_num_threads(threads)
        self._rounds, self._steps, self._context = rounds, steps, context
        self._settings: dict[str, Value] = {"threads": threads, "context": context, "page_size": page_size,
                                            "numerics": numerics}
        max_tokens = context + 2 + (rounds + 1) * (steps + 1)
        self._ours = OurSide(numerics=Numerics(numerics), page_size=page_size, max_tokens=max_tokens)
        self._reference = Reference(MODEL, max_tokens=max_tokens, threads=threads)
        vocab = MODEL["vocab_size"]
        assert isinstance(vocab, int)
        self._prompts = torch.randint(vocab, (MAX_ROWS, context), generator=torch.Generator().manual_seed(1))

    def run(self) -> dict[str, Value]:
        """Every case's medians and ratio, and how alike both sides' logits are behind the prompt (1 is equal)."""
        with _foreign_cores(self._reference.cpu_s) as foreign:
            prefill, cosine = self._prefill()
            cases = [prefill, *(self._decode(rows) for rows in (1, MAX_ROWS))]
        report = {key: value for case in cases for key, value in case.report().items()}
        self._reference.close()
        return {**self._settings, **report, "logit_cosine": cosine, "foreign_cores": round(foreign(), 2)}

    def _prefill(self) -> tuple[Case, float]:
        case = Case(f"prefill_{self._context}", self._context)
        prompt, cosine = self._prompts[:1], 0.0
        for index in range(self._rounds + 1):
            logits, ours = _timed(lambda: self._ours.step(0, prompt, 0))
            _, stamps, expected = self._reference.generate(prompt, 1, afresh=True)
            cosine = float(torch.cosine_similarity(logits.double(), expected.double()))
            if index:  # the first round warms up
                case.add([ours], [stamps[-1]])
        return case, round(cosine, 6)

    def _decode(self, rows: int) -> Case:
        """Both sides walk on from the same prompts, a few tokens each in turn; both compute, neither is told."""
        case = Case(f"decode_b{rows}", rows)
        for row in range(rows):
            self._ours.step(row, self._prompts[row : row + 1], 0)
        ids, _, _ = self._reference.generate(self._prompts[:rows], 1, afresh=True)
        context, tokens = self._context, ids[:, -1:]
        for index in range(self._rounds + 1):
            ours: list[float] = []
            for _ in range(self._steps):
                logits, seconds = _timed(lambda: self._ours.step(0, tokens, context))  # noqa: B023
                tokens, context = logits.argmax(-1, keepdim=True), context + 1
                ours.append(seconds)
            ids, stamps, _ = self._reference.generate(ids, self._steps + 1, afresh=False)
            if index:
                case.add(ours, [after - before for before, after in itertools.pairwise(stamps)])
        return case


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


@contextmanager
def _foreign_cores(reference_s: Callable[[], float]) -> Iterator[Callable[[], float]]:
    """While it is open: how many cores everybody else kept busy. To be called after it closed."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")

    def busy_s() -> float:
        user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + soft_irq + steal) / ticks_per_s

    started, busy, own = time.perf_counter(), busy_s(), time.process_time() + reference_s()
    result = 0.0
    yield lambda: result
    result = (busy_s() - busy - (time.process_time() + reference_s() - own)) / (time.perf_counter() - started)
