"""`python -m bench.gpu_warm`: compile everything that is compiled on first use, and run each piece
once.

FlashInfer compiles a kernel at the first plan, Triton at the first launch; in sequence that takes
minutes. Here each piece has its own process, so all together take as long as the slowest. The
compiled code is kept on disk for later processes. The run also checks a machine: it names each
piece that cannot be compiled, planned or run, with the end of its output.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

import torch
from torch import Tensor

from bench.gpu import KERNEL, LAYER, PAGE
from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.latent_wrappers import FlashInferLatentWrappers
from engine.backends.cuda.recurrent import DeviceRecurrent
from engine.backends.cuda.wrappers import FlashInferWrappers
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.rows import Row, build_batch
from engine.kernels.device.cache import write_kv
from runtime.errors import BatonError, ConfigError

LIMIT_S = 240.0
HEAD_DIMS = (64, 128, 256)
_TAIL = 1500  # characters of a failed piece's output
_DEVICE = torch.device("cuda", 0)


def decode(head_dim: int) -> Tensor:
    """Run decode with as few query heads per kv head as have their own kernel.

    More query heads use the kernel of prefill.
    """
    return _attention(head_dim, ForwardMode.DECODE, None, 1, num_heads=4)


def prefill(head_dim: int) -> Tensor:
    return _attention(head_dim, ForwardMode.PREFILL, None, 5)


def tree(head_dim: int) -> Tensor:
    return _attention(head_dim, ForwardMode.VERIFY, SpecRow((-1, 0, 0)), 3)


def _attention(
    head_dim: int, mode: ForwardMode, spec: SpecRow | None, count: int, *, num_heads: int = 8
) -> Tensor:
    geometry = AttentionGeometry(
        num_heads=num_heads, num_kv_heads=2, head_dim=head_dim, page_size=PAGE, scale=head_dim**-0.5
    )
    pool = torch.zeros(4, 2, 2, PAGE, head_dim, dtype=torch.bfloat16, device=_DEVICE)
    backend = FlashInferAttention(
        kv_pools={LAYER: pool},
        geometry=geometry,
        wrappers=FlashInferWrappers(_DEVICE),
        device=_DEVICE,
        write_kv=write_kv,
    )
    batch = build_batch(mode, [Row(1, [0] * count, 7, [1, 2], 1, None, spec)])
    backend.plan(batch)
    q, kv = (
        torch.randn(count, heads, head_dim, dtype=torch.bfloat16, device=_DEVICE)
        for heads in (num_heads, 2)
    )
    return backend.run(LAYER, q, kv, kv, batch)


def latent() -> Tensor:
    """Run attention of DeepSeek's shape, one row of five tokens."""
    wrapper = FlashInferLatentWrappers(_DEVICE).latent()
    starts, pages, length = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, 5], [0, 1], [5])
    )
    wrapper.plan(
        starts,
        pages,
        pages[:1].to(_DEVICE),
        length,
        16,
        512,
        64,
        64,
        True,  # noqa: FBT003
        0.1,
        torch.bfloat16,
        torch.bfloat16,
    )
    q, pool = (
        torch.randn(*shape, dtype=torch.bfloat16, device=_DEVICE)
        for shape in ((5, 16, 576), (2, 64, 576))
    )
    return wrapper.run(q[..., :512], q[..., 512:], pool[..., :512], pool[..., 512:])


def recurrent(num_k_heads: int, num_v_heads: int, dtype: torch.dtype) -> Tensor:
    """Run prompts, whose kernels compile longest, and steps."""
    channels = (2 * num_k_heads + num_v_heads) * 128
    backend = DeviceRecurrent(
        conv_pools={LAYER: torch.zeros(2, KERNEL - 1, channels, dtype=dtype, device=_DEVICE)},
        state_pools={LAYER: torch.zeros(2, num_v_heads, 128, 128, device=_DEVICE)},
    )
    weight = torch.randn(channels, KERNEL, dtype=dtype, device=_DEVICE)
    outputs = []
    for mode, count, context in ((ForwardMode.PREFILL, 70, 0), (ForwardMode.DECODE, 1, 70)):
        batch = build_batch(mode, [Row(1, [0] * count, context, [1] * 5, 1, None)])
        x = backend.causal_conv(
            LAYER, torch.randn(count, channels, dtype=dtype, device=_DEVICE), weight, batch
        )
        q, k, v = (
            part.view(count, -1, 128)
            for part in torch.split(
                x, [num_k_heads * 128, num_k_heads * 128, num_v_heads * 128], -1
            )
        )
        g, beta = torch.rand(2, count, num_v_heads, device=_DEVICE)
        outputs.append(backend.gated_delta_rule(LAYER, q, k, v, -g, beta, batch))
    return torch.cat(outputs)


PIECES: Mapping[str, Callable[[], Tensor]] = {
    "recurrent": partial(recurrent, 16, 32, torch.bfloat16),
    "recurrent fp32": partial(recurrent, 4, 8, torch.float32),
    **{f"prefill {dim}": partial(prefill, dim) for dim in HEAD_DIMS},
    **{f"decode {dim}": partial(decode, dim) for dim in HEAD_DIMS},
    "tree 128": partial(tree, 128),
    "latent": latent,
}


def run_all(
    commands: Mapping[str, Sequence[str]], limit_s: float, tell: Callable[[str], None]
) -> int:
    """Run every command at once, each with a time limit; return the number that failed.

    Reports how each one ended.
    """
    jobs = max(1, 2 * len(os.sched_getaffinity(0)) // max(1, len(commands)))
    environment = {
        **os.environ,
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(jobs)),
    }  # of each process's compilers
    began = time.monotonic()

    def run(command: Sequence[str]) -> str:
        """Return the problem, or "" on success."""
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                written, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # with its compilers, which hold its output open
                return f"not done within {limit_s:g} s"
        return f"exit status {process.returncode}\n{written[-_TAIL:]}" if process.returncode else ""

    with ThreadPoolExecutor(len(commands)) as threads:
        running = {threads.submit(run, command): name for name, command in commands.items()}
        failures = 0
        for ended in as_completed(running):
            wrong = ended.result()
            failures += bool(wrong)
            tell(f"{running[ended]}: {wrong or 'ok'} ({time.monotonic() - began:.0f} s)")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        help=f"time limit of each piece in seconds; default {LIMIT_S:g}",
    )
    parser.add_argument("--piece", choices=PIECES, help="run only this piece, in this process")
    flags = parser.parse_args()
    try:
        if not torch.cuda.is_available():
            raise ConfigError("bench.gpu_warm needs a CUDA device", field="device")
        if flags.piece is not None:
            if not bool(PIECES[flags.piece]().isfinite().all()):
                sys.exit("it ran, but its result is not finite")
            return
        commands = {
            name: [sys.executable, "-m", "bench.gpu_warm", "--piece", name] for name in PIECES
        }
        if run_all(commands, flags.limit, lambda line: print(line, flush=True)):
            sys.exit(1)
    except BatonError as error:
        sys.exit(f"bench.gpu_warm: {error}")


if __name__ == "__main__":
    main()
