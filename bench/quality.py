"""`python -m bench.quality MODEL`: how near distributions of tokens are to the model's.

The text is CPython's language reference, which every installation contains
(`pydoc_data.topics`), in pieces of 512 tokens. At each position but the first of each piece, the
distribution of the next token is compared with that of transformers in fp32:

    agreement    the share of positions with the same most likely token
    kl           the mean Kullback-Leibler divergence of the fp32 distribution, in nats
    perplexity   exp of the mean negative log probability of the text's own tokens

Subjects are transformers in the model's dtype, and Baton on the host, where both kinds of numerics
are the same, with the model's weights (`baton`) and with `--weights int8` and `int4`. All are in
memory together.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from bench.report import Value, render
from engine.core.batch import ForwardMode, ScoringRow
from engine.core.numerics import WeightFormat
from models.loader import ModelDescription, read_model
from tests.support.models.single_stage import StageDriver

PIECE_TOKENS = 512
PAGE_SIZE = 64
Logits = Callable[[list[int]], Tensor]  # of all tokens but the last, [n - 1, vocab]


@dataclass
class Quality:
    """Sums over positions of one subject."""

    positions: int = 0
    agreeing: int = 0
    divergence: float = 0.0
    surprise: float = 0.0

    def add(self, found: Tensor, expected: Tensor, following: Tensor) -> None:
        """Add log probabilities [n, vocab] of a piece, and its next tokens [n]."""
        self.positions += len(following)
        self.agreeing += int((found.argmax(-1) == expected.argmax(-1)).sum())
        self.divergence += float((expected.exp() * (expected - found)).sum())
        self.surprise -= float(found.gather(1, following[:, None]).sum())

    @property
    def agreement(self) -> float:
        return self.agreeing / self.positions

    @property
    def kl(self) -> float:
        return self.divergence / self.positions

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.surprise / self.positions).exp())


def pieces_of_text(tokenizer: Tokenizer, num_pieces: int) -> Iterator[list[int]]:
    """Yield the first pieces of the text, `PIECE_TOKENS` each."""
    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name], add_special_tokens=False).ids
        if len(tokens) >= num_pieces * PIECE_TOKENS:
            break
    for piece in range(num_pieces):
        yield tokens[piece * PIECE_TOKENS : (piece + 1) * PIECE_TOKENS]


def baton_logits(model: ModelDescription) -> Logits:
    """Return the logits of one process without any handoff."""
    driver = StageDriver(model, page_size=PAGE_SIZE, num_sequences=1, max_tokens=PIECE_TOKENS)

    def logits(tokens: list[int]) -> Tensor:
        driver.forget(0)
        batch = driver.batch(ForwardMode.PREFILL, {0: tokens}, samples=False)
        batch.scoring = (ScoringRow(tuple(tokens[1:]), num_top=0),)
        found = driver.run(batch).logits
        assert found is not None
        return found

    return logits


def reference_logits(model: Path, dtype: torch.dtype | None) -> Logits:
    """Return the logits of transformers, in `dtype` or the checkpoint's."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    module = load(model, dtype=dtype or "auto")
    module.train(mode=False)

    @torch.no_grad()
    def logits(tokens: list[int]) -> Tensor:
        found: Tensor = module(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
        return found

    return logits


def subjects_of(model: Path) -> Mapping[str, Callable[[], Logits]]:
    """Return the loaders of the subjects by name."""
    whole = read_model(model)
    return {
        "transformers": lambda: reference_logits(model, None),
        "baton": lambda: baton_logits(whole),
        **{
            each: partial(baton_logits, replace(whole, weight_format=each))
            for each in (WeightFormat.INT8, WeightFormat.INT4)
        },
    }


def compare(
    model: Path, subjects: Mapping[str, Callable[[], Logits]], num_pieces: int
) -> dict[str, Quality]:
    """Return the quality of each subject, and of `fp32`, transformers in that type."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces = list(pieces_of_text(tokenizer, num_pieces))
    reference = reference_logits(model, torch.float32)
    found = {name: Quality() for name in ("fp32", *subjects)}
    loaded = {"fp32": reference, **{name: load() for name, load in subjects.items()}}
    for tokens in pieces:
        following = torch.tensor(tokens[1:])
        expected = reference(tokens).log_softmax(-1)
        for name, logits in loaded.items():
            own = expected if name == "fp32" else logits(tokens).float().log_softmax(-1)
            found[name].add(own, expected, following)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of a checkpoint with a tokenizer.json")
    parser.add_argument("--pieces", type=int, default=10, help="pieces of text, default 10")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    found = compare(flags.model, subjects_of(flags.model), flags.pieces)
    values: dict[str, Value] = {"positions": found["fp32"].positions}
    for name, quality in found.items():
        if name != "fp32":
            values[f"{name}_agreement"] = round(quality.agreement, 4)
            values[f"{name}_kl"] = float(f"{quality.kl:.2e}")
        values[f"{name}_perplexity"] = round(quality.perplexity, 3)
    print(render("quality", values, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
