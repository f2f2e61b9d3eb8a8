"""`python -m bench.engine`: one stage of a Qwen3-0.6B-shaped model beside transformers' `generate`.

Both get the same random bf16 weights, the same prompts and the same threads, and take turns, so that a change of the
machine's speed meets both. The reference has a process of its own, started as anybody starts it; ours sets huge pages
for its allocator, as the roles do. Three cases: prefill of a prompt, decode of 1 row, decode of 8 rows behind that
prompt. Ours is everything a worker does per step but the scheduling: build the batch, plan, forward, argmax; keys and
values lie in scattered pages. The reference is greedy `generate` over a static cache. A case's ratio is the median over
rounds of (reference time / our time). `foreign_cores` says how many cores other processes took: above 0.2 the figures
are noise.
"""

import argparse
import os
import sys

from bench.report import render


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("threads", 2), ("rounds", 5), ("steps", 6), ("context", 512), ("page-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact", help="default exact")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    flags = parser.parse_args()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for tensors; torch reads it when it loads
    from bench.engine_cases import EngineBench

    values = EngineBench(threads=flags.threads, rounds=flags.rounds, steps=flags.steps, context=flags.context,
                         page_size=flags.page_size, numerics=flags.numerics).run()
    print(render("engine", values, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
