"""`python -m bench.coded_weights`: accuracy and speed of weights in eight or four bits.

Accuracy is measured on the demo model (over stories like those of its training) and on a random
model of Qwen3-0.6B's shape, at each position of the same text. `error` is the root mean square
difference of the logits from those of full weights, over their standard deviation. `agreement` is
the share of positions with the same most likely token. `decided_agreement` is the same for
positions whose most likely token leads by more than 1 in log probability.

Speed runs `bench.engine`'s cases with codes as ours and bf16 as the reference, in processes that
take turns on the same cores; a ratio above 1 is the gain of the codes. `foreign_cores` is the number of cores
that other processes used; above 0.2 the figures are noise.
"""

import argparse
import os
import sys
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.cluster_config import demo_model
from bench.engine import HUGE_PAGES, SideProcess, measure
from bench.engine_sides import MODEL, VOCAB_SIZE
from bench.report import Value, render
from demo.corpus import documents
from engine.core.batch import ForwardMode, ScoringRow
from engine.core.numerics import WeightFormat
from models.loader import ModelDescription, random_model, read_model
from tests.support.models.single_stage import StageDriver

NUM_TOKENS = 384
PAGE_SIZE = 64
DECIDED = 1.0


@torch.inference_mode()
def accuracy(
    whole: ModelDescription, tokens: list[int], weight_format: WeightFormat
) -> dict[str, Value]:
    """Return the accuracy of a format against the model's own weights.

    The last position is left out.
    """
    ours, theirs = (
        _logits(replace(whole, weight_format=each), tokens)
        for each in (weight_format, WeightFormat.MODEL)
    )
    best = theirs.topk(2, dim=-1)
    same = ours.argmax(-1) == best.indices[:, 0]
    decided = best.values[:, 0] - best.values[:, 1] > DECIDED
    error = (ours - theirs).square().mean().sqrt() / theirs.std()
    return {
        "error": round(error.item(), 4),
        "agreement": round(same.float().mean().item(), 4),
        "decided_agreement": round(same[decided].float().mean().item(), 4)
        if decided.any()
        else None,
    }


def _logits(description: ModelDescription, tokens: list[int]) -> Tensor:
    """Return the logits, [len(tokens) - 1, vocab]."""
    driver = StageDriver(description, page_size=PAGE_SIZE, num_sequences=1, max_tokens=len(tokens))
    batch = driver.batch(ForwardMode.PREFILL, {0: tokens}, samples=False)
    batch.scoring = (ScoringRow(tuple(tokens[1:]), num_top=0),)
    logits = driver.run(batch).logits
    assert logits is not None
    return logits


def demo_tokens() -> list[int]:
    """Return tokens of stories that were not in the demo model's training data."""
    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    tokens: list[int] = []
    for document in documents(1 << 20, max_facts=4, task_share=0.1):
        tokens += tokenizer.encode("".join(piece.text for piece in document)).ids
        if len(tokens) >= NUM_TOKENS:
            break
    return tokens[:NUM_TOKENS]


def speed(
    weight_format: WeightFormat, *, threads: int, rounds: int, steps: int, context: int
) -> dict[str, Value]:
    """Return the figures of `bench.engine.measure`."""
    max_tokens = context + 2 + (rounds + 1) * (steps + 1)
    arguments = [
        f"--threads={threads}",
        f"--context={context}",
        f"--max-tokens={max_tokens}",
        f"--page-size={PAGE_SIZE}",
    ]
    sides = [
        SideProcess(
            name,
            [
                sys.executable,
                "-m",
                "bench.engine_sides",
                "ours",
                f"--weights={name}",
                *arguments,
            ],
            {**os.environ, **HUGE_PAGES},
        )
        for name in (weight_format, WeightFormat.MODEL)
    ]
    with sides[0] as ours, sides[1] as reference:
        return measure(ours, reference, rounds=rounds, steps=steps, context=context)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("threads", 2), ("rounds", 8), ("steps", 4), ("context", 512)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--weights", type=WeightFormat, default=WeightFormat.INT8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    random_tokens = torch.randint(
        VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    values: dict[str, Value] = {}
    for name, model, tokens in (
        ("demo", read_model(demo_model()), demo_tokens()),
        ("random_0.6b", random_model(MODEL), random_tokens),
    ):
        values |= {
            f"{name}_{key}": value for key, value in accuracy(model, tokens, flags.weights).items()
        }
    values |= speed(
        flags.weights,
        threads=flags.threads,
        rounds=flags.rounds,
        steps=flags.steps,
        context=flags.context,
    )
    print(
        render(
            "coded_weights",
            {
                "weights": str(flags.weights),
                "threads": flags.threads,
                "context": flags.context,
                **values,
            },
            as_json=flags.json,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
