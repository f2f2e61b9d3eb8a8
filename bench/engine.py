"""`python -m bench.engine`: a model of Qwen3-0.6B's shape against transformers' `generate`.

Both have the same random bf16 weights, prompts and threads, each in its own process. They take
turns on the same cores every few steps, so that a change of the machine's speed affects both. The
cases are prefill of a prompt, and decode of 1 row and of 8 rows after that prompt. The reference is
greedy `generate` over a static cache, as installed. Our roles also enable huge pages for tensors;
`--reference-huge-pages` does so for the reference. The ratio of a case is the median over rounds of
reference time / our time. `foreign_cores` is the number of cores that other processes used; above
0.2 the figures are noise.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass, field
from statistics import median

from bench.report import OtherLoad, Value, render
from bench.sides import LineProcess

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch reads it at import


class SideProcess(LineProcess):
    """One side of the comparison; its commands and responses are JSON."""

    def ask(self, **command: object) -> dict[str, list[float]]:
        return _read(self.exchange(json.dumps(command)))

    def answer(self) -> dict[str, list[float]]:
        """Return the next response; the first one arrives when the model is loaded."""
        return _read(self.next_line())


def _read(line: str) -> dict[str, list[float]]:
    answer: dict[str, list[float]] = json.loads(line)
    return answer


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
        print(
            f"{self.name}: {median(ours) * 1e3:.0f} ms, reference {median(reference) * 1e3:.0f} ms",
            file=sys.stderr,
        )

    def report(self) -> dict[str, Value]:
        def rate(rounds: list[list[float]]) -> float:
            return round(
                self.tokens_per_step / median(seconds for one in rounds for seconds in one), 2
            )

        ratios = [
            median(theirs) / median(ours)
            for ours, theirs in zip(self.ours, self.reference, strict=True)
        ]
        return {
            f"{self.name}_tokens_per_s": rate(self.ours),
            f"{self.name}_reference_tokens_per_s": rate(self.reference),
            f"{self.name}_ratio": round(median(ratios), 3),
        }


def measure(
    ours: SideProcess, reference: SideProcess, *, rounds: int, steps: int, context: int
) -> dict[str, Value]:
    """Return each case's medians and ratio, and the similarity of both sides' logits (1: equal)."""
    sides = (ours, reference)
    for side in sides:
        side.answer()
    others = OtherLoad()
    prefill = Case(f"prefill_{context}", context)
    answers = [side.ask(do="prefill") for side in sides]  # warm-up
    for _ in range(rounds):
        answers = [side.ask(do="prefill") for side in sides]
        prefill.add(*(answer["seconds"] for answer in answers))
    cases = [prefill]
    for rows in (1, 8):
        case = Case(f"decode_b{rows}", rows)
        for side in sides:
            side.ask(do="begin", rows=rows)
            side.ask(do="decode", steps=steps)
        for _ in range(rounds):
            case.add(*(side.ask(do="decode", steps=steps)["seconds"] for side in sides))
        cases.append(case)
    return {
        **{key: value for case in cases for key, value in case.report().items()},
        "logit_cosine": round(_cosine(answers[0]["logits"], answers[1]["logits"]), 6),
        **others.figures(),
    }


def _cosine(a: list[float], b: list[float]) -> float:
    return sum(map(float.__mul__, a, b)) / math.hypot(*a) / math.hypot(*b)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("threads", 2),
        ("rounds", 8),
        ("steps", 4),
        ("context", 512),
        ("page-size", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument(
        "--numerics",
        choices=("exact", "fast"),
        default="exact",
        help="numerics of Baton; default exact",
    )
    parser.add_argument(
        "--reference-huge-pages", action="store_true", help="use huge pages in the reference, too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    max_tokens = flags.context + 2 + (flags.rounds + 1) * (flags.steps + 1)
    arguments = [
        f"--numerics={flags.numerics}",
        f"--threads={flags.threads}",
        f"--context={flags.context}",
        f"--max-tokens={max_tokens}",
        f"--page-size={flags.page_size}",
    ]
    plain = {name: value for name, value in os.environ.items() if name not in HUGE_PAGES}
    huge = {**plain, **HUGE_PAGES}
    command = [sys.executable, "-m", "bench.engine_sides"]
    with (
        SideProcess("ours", [*command, "ours", *arguments], huge) as ours,
        SideProcess(
            "reference",
            [*command, "reference", *arguments],
            huge if flags.reference_huge_pages else plain,
        ) as reference,
    ):
        values = measure(
            ours, reference, rounds=flags.rounds, steps=flags.steps, context=flags.context
        )
    print(
        render(
            "engine",
            {
                "threads": flags.threads,
                "context": flags.context,
                "page_size": flags.page_size,
                "numerics": flags.numerics,
                "reference_huge_pages": flags.reference_huge_pages,
                **values,
            },
            as_json=flags.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
