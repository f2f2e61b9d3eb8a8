"""`python -m bench.gpu`: device code against the machine's own ceilings, measured in the same run.

The cases are attention of one 8B-shaped layer (32 heads, 8 kv heads, head_dim 128, bf16) and
recurrent layers of a 9B-shaped hybrid, by batch and context. Decode is compared with a device copy
of the same bytes, prefill with a large matrix product.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.report import Value, render
from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.recurrent import DeviceRecurrent
from engine.backends.cuda.wrappers import FlashInferWrappers
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.device.cache import write_kv
from runtime.errors import BatonError, ConfigError

PAGE = 16
GEOMETRY = AttentionGeometry(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=PAGE, scale=128**-0.5
)
K_HEADS = 16
V_HEADS = 32
DIM = 128
KERNEL = 4
LAYER = 0
REPEATS = 20


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a copy (read and write), FLOP/s of a bf16 product of 8192 square."""

    copy_bps: float
    matmul_flops: float


def seconds(run: Callable[[], object]) -> float:
    """Return the median seconds per call, launch included."""
    for _ in range(3):
        run()
    times = list[float]()
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]


def ceilings(device: torch.device) -> Ceilings:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return Ceilings(
        2 * source.numel() / seconds(lambda: target.copy_(source)),
        2 * 8192**3 / seconds(lambda: square @ square),
    )


def make_batch(mode: ForwardMode, num_rows: int, query_len: int, context_len: int) -> ForwardBatch:
    """Return a batch of rows of one length with scattered pages."""
    num_pages = -(-(context_len + query_len) // PAGE)
    pages = (
        torch.randperm(num_rows * num_pages, generator=torch.Generator().manual_seed(0)).int() + 1
    )
    count = num_rows * query_len
    return ForwardBatch(
        mode=mode,
        request_keys=tuple(range(num_rows)),
        query_lens=(query_len,) * num_rows,
        context_lens=(context_len,) * num_rows,
        token_ids=torch.zeros(count, dtype=torch.long),
        positions=(torch.arange(query_len) + context_len).repeat(num_rows),
        page_tables=pages.view(num_rows, num_pages),
        slot_ids=torch.arange(1, num_rows + 1, dtype=torch.int32),
        sampling=(None,) * num_rows,
    )


def attention(
    device: torch.device, mode: ForwardMode, num_rows: int, query_len: int, context_len: int
) -> float:
    """Return the seconds per layer, without planning: one plan serves all layers."""
    batch = make_batch(mode, num_rows, query_len, context_len)
    shape = (batch.page_tables.numel() + 1, 2, GEOMETRY.num_kv_heads, PAGE, GEOMETRY.head_dim)
    pool = torch.randn(shape, dtype=torch.bfloat16, device=device)
    backend = FlashInferAttention(
        kv_pools={LAYER: pool},
        geometry=GEOMETRY,
        wrappers=FlashInferWrappers(device),
        device=device,
        write_kv=write_kv,
    )
    backend.plan(batch)
    q, kv = (
        torch.randn(batch.num_tokens, heads, GEOMETRY.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (GEOMETRY.num_heads, GEOMETRY.num_kv_heads)
    )
    return seconds(lambda: backend.run(LAYER, q, kv, kv, batch))


def recurrent(device: torch.device, mode: ForwardMode, num_rows: int, query_len: int) -> float:
    """Return the seconds of one layer's delta rule."""
    batch = make_batch(mode, num_rows, query_len, 0 if mode is ForwardMode.PREFILL else 64)
    states = torch.zeros(num_rows + 1, V_HEADS, DIM, DIM, device=device)
    backend = DeviceRecurrent(conv_pools={}, state_pools={LAYER: states})
    count = batch.num_tokens
    q, k = (torch.randn(count, K_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
    v = torch.randn(count, V_HEADS, DIM, dtype=torch.bfloat16, device=device)
    g, beta = (torch.rand(count, V_HEADS, device=device) for _ in range(2))
    return seconds(lambda: backend.gated_delta_rule(LAYER, q, k, v, -g, beta, batch))


def measure(device: torch.device) -> Iterator[dict[str, Value]]:
    """Yield the figures of each part when it is complete."""
    limits = ceilings(device)
    yield {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "copy_gbps": limits.copy_bps / 1e9,
        "matmul_tflops": limits.matmul_flops / 1e12,
    }
    values: dict[str, Value] = {}
    for context in (1024, 8192):
        for rows in (1, 8, 32, 128):
            took = attention(device, ForwardMode.DECODE, rows, 1, context)
            read = rows * context * 2 * GEOMETRY.num_kv_heads * GEOMETRY.head_dim * 2
            values[f"decode_b{rows}_c{context}_us"] = took * 1e6
            values[f"decode_b{rows}_c{context}_of_copy"] = read / took / limits.copy_bps
    yield values
    values = {}
    for tokens in (2048, 8192):
        took = attention(device, ForwardMode.PREFILL, 1, tokens, 0)
        flops = (
            2 * 2 * GEOMETRY.num_heads * GEOMETRY.head_dim * tokens * tokens / 2
        )  # causal: half of the square
        values[f"prefill_{tokens}_us"] = took * 1e6
        values[f"prefill_{tokens}_of_matmul"] = flops / took / limits.matmul_flops
    yield values
    values = {}
    for rows in (1, 32, 128):
        took = recurrent(device, ForwardMode.DECODE, rows, 1)
        values[f"delta_b{rows}_us"] = took * 1e6
        values[f"delta_b{rows}_of_copy"] = (
            2 * rows * V_HEADS * DIM * DIM * 4 / took / limits.copy_bps
        )
    values["delta_prefill_2048_us"] = recurrent(device, ForwardMode.PREFILL, 1, 2048) * 1e6
    yield values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON objects, one per part")
    arguments = parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise ConfigError("bench.gpu needs a CUDA device", field="device")
        for values in measure(torch.device("cuda", 0)):
            print(render("gpu", values, as_json=arguments.json), flush=True)
    except BatonError as error:
        sys.exit(
            f"error: {error}"
            if not arguments.json
            else json.dumps({"bench": "gpu", "error": str(error)})
        )


if __name__ == "__main__":
    main()
