"""One side of `bench.recurrent`: recurrent layers and latent attention of the checkout in
PYTHONPATH.

Each checkout has its own process. It reads one case per line from stdin ("delta prefill 1 512":
part, kind, rows, and tokens or context) and writes the seconds that each layer took.
"""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.cpu.latent import CpuLatentAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.contracts.latent import LatentGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import Numerics
from engine.core.rows import Row, build_batch

NUM_LAYERS = 4
MAX_ROWS = 8
PAGE_SIZE = 64
MAX_TOKENS = 4096
PAGES_PER_ROW = MAX_TOKENS // PAGE_SIZE
# of Qwen3.5-0.8B: as many key heads as value heads
HEADS = 16
DIM = 128
KERNEL = 4
CHANNELS = 3 * HEADS * DIM
# of DeepSeek-V3
LATENT_HEADS = 128
LATENT = 512
ROPE = 64
# of DeepSeek-V3.2
INDEX_HEADS = 64
INDEX_DIM = 128
SELECTED = 2048


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def batch_of(kind: str, rows: int, length: int) -> ForwardBatch:
    order = torch.arange(1, 1 + MAX_ROWS * PAGES_PER_ROW).view(MAX_ROWS, PAGES_PER_ROW).tolist()
    if kind == "prefill":
        return build_batch(
            ForwardMode.PREFILL,
            [Row(row, [1] * length, 0, order[row], row + 1, None) for row in range(rows)],
        )
    return build_batch(
        ForwardMode.DECODE,
        [Row(row, [1], length - 1, order[row], row + 1, None) for row in range(rows)],
    )


class Delta:
    """Convolution and delta rule."""

    def __init__(self) -> None:
        conv = {
            layer: random_tensor(MAX_ROWS + 1, KERNEL - 1, CHANNELS) for layer in range(NUM_LAYERS)
        }
        state = {
            layer: torch.randn(MAX_ROWS + 1, HEADS, DIM, DIM) * 0.01 for layer in range(NUM_LAYERS)
        }
        self._backend = CpuRecurrent(conv_pools=conv, state_pools=state, numerics=Numerics.EXACT)
        self._weights = [random_tensor(CHANNELS, KERNEL) for _ in range(NUM_LAYERS)]

    def prepare(self, batch: ForwardBatch) -> Callable[[int], object]:
        count = batch.num_tokens
        x = random_tensor(count, CHANNELS + HEADS * DIM)[
            :, :CHANNELS
        ]  # next to other columns, as in a projection's output
        g = -torch.rand(count, HEADS)
        beta = torch.rand(count, HEADS)

        def run(layer: int) -> Tensor:
            mixed = self._backend.causal_conv(layer, x, self._weights[layer], batch)
            q, k, v = (
                part.reshape(count, HEADS, DIM) for part in torch.split(mixed, HEADS * DIM, -1)
            )
            return self._backend.gated_delta_rule(layer, q, k, v, g, beta, batch)

        return run


class Latent:
    """Attention over compressed keys, with or without a choice of keys."""

    def __init__(self, *, chooses: bool) -> None:
        pages = 1 + MAX_ROWS * PAGES_PER_ROW
        latent = {
            layer: random_tensor(pages, PAGE_SIZE, LATENT + ROPE) for layer in range(NUM_LAYERS)
        }
        index = (
            {layer: random_tensor(pages, PAGE_SIZE, INDEX_DIM) for layer in range(NUM_LAYERS)}
            if chooses
            else {}
        )
        geometry = LatentGeometry(
            num_heads=LATENT_HEADS,
            latent_dim=LATENT,
            rope_dim=ROPE,
            page_size=PAGE_SIZE,
            scale=0.1,
            max_selected=SELECTED if chooses else 0,
        )
        self._chooses = chooses
        self._backend = CpuLatentAttention(
            latent_pools=latent, index_pools=index, geometry=geometry
        )

    def prepare(self, batch: ForwardBatch) -> Callable[[int], object]:
        count = batch.num_tokens
        backend = self._backend
        q = random_tensor(count, LATENT_HEADS, LATENT + ROPE)
        entries = random_tensor(count, LATENT + ROPE)
        index_q = random_tensor(count, INDEX_HEADS, INDEX_DIM)
        index_k = random_tensor(count, INDEX_DIM)
        weights = torch.rand(count, 64)
        backend.plan(batch)

        def run(layer: int) -> Tensor:
            selected = (
                backend.select(layer, index_q, index_k, weights, batch) if self._chooses else None
            )
            return backend.run(layer, q, entries, selected, batch)

        return run


def main() -> None:
    torch.manual_seed(0)
    parts: dict[str, Delta | Latent] = {
        "delta": Delta(),
        "latent": Latent(chooses=False),
        "chosen": Latent(chooses=True),
    }
    for line in sys.stdin:
        part, kind, *numbers = line.split()
        run = parts[part].prepare(batch_of(kind, *map(int, numbers)))
        started = time.perf_counter()
        for layer in range(NUM_LAYERS):
            run(layer)
        print((time.perf_counter() - started) / NUM_LAYERS, flush=True)


if __name__ == "__main__":
    main()
