"""One side of `bench.attention`: the attention of the checkout in PYTHONPATH, timed case by case.

Each checkout has its own process. It reads one case per line from stdin ("decode 8 512": rows and
context; "prefill 1 512": rows and tokens) and writes the seconds that each layer took.
"""

import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionBackend, AttentionGeometry
from engine.core.batch import ForwardMode
from engine.core.rows import Row, build_batch

GEOMETRY = AttentionGeometry(
    num_heads=16, num_kv_heads=8, head_dim=128, page_size=64, scale=128**-0.5
)
# 450 MB of pages, so that no cache holds what is read
NUM_LAYERS = 6
MAX_ROWS = 32
PAGES_PER_ROW = 9
PROMPT_PAGES = 33


def build(pools: Mapping[int, Tensor]) -> AttentionBackend:
    make: Callable[..., AttentionBackend] = CpuAttention
    try:
        return make(kv_pools=pools, geometry=GEOMETRY)
    except TypeError:  # a checkout in which attention was not one kernel yet
        from engine.core.numerics import Numerics

        return make(kv_pools=pools, geometry=GEOMETRY, numerics=Numerics.EXACT)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of `count` tokens; dense: they are rotated in place."""
    return tuple(torch.randn(count, heads, GEOMETRY.head_dim).bfloat16() for heads in (16, 8, 8))  # type: ignore[return-value]


def main() -> None:
    torch.manual_seed(0)
    shape = (
        1 + MAX_ROWS * PAGES_PER_ROW,
        2,
        GEOMETRY.num_kv_heads,
        GEOMETRY.page_size,
        GEOMETRY.head_dim,
    )
    some = torch.randn(shape).bfloat16()
    backend = build({layer_id: some.clone() for layer_id in range(NUM_LAYERS)})
    order = (torch.randperm(MAX_ROWS * PAGES_PER_ROW) + 1).tolist()
    for turn, line in enumerate(sys.stdin):
        kind, rows, length = line.split()[0], *map(int, line.split()[1:])
        first = turn * rows % MAX_ROWS
        if kind == "decode":
            tables = [order[(first + row) * PAGES_PER_ROW :][:PAGES_PER_ROW] for row in range(rows)]
            batch = build_batch(
                ForwardMode.DECODE,
                [Row(row, [1], length - 1, table, 0, None) for row, table in enumerate(tables)],
            )
        else:
            batch = build_batch(
                ForwardMode.PREFILL, [Row(0, [1] * length, 0, order[:PROMPT_PAGES], 0, None)]
            )
        q, k, v = tokens(batch.num_tokens)
        backend.plan(batch)
        started = time.perf_counter()
        for layer_id in range(NUM_LAYERS):
            backend.run(layer_id, q, k, v, batch)
        print((time.perf_counter() - started) / NUM_LAYERS, flush=True)


if __name__ == "__main__":
    main()
