"""Tokens per target pass: `python -m demo.evaluate_draft`.

Greedy, on held-out prompts with long responses.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from demo import corpus
from demo.draft import DraftHead, load_draft
from demo.drafting import TreeShape, target_passes
from demo.train_draft import target_features

SHAPES = {
    "chain 3": TreeShape(1, 3, 3),
    "chain 5": TreeShape(1, 5, 5),
    "tree 4x4/15": TreeShape(4, 4, 15),
    "tree 8x5/31": TreeShape(8, 5, 31),
}
MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Rollout:
    """A prompt with the target's greedy continuation, and the features that the draft reads."""

    ids: Tensor
    prompt_length: int
    features: Tensor


@torch.no_grad()
def roll_out(model: Qwen3_5ForCausalLM, prompt: list[int], layer_ids: tuple[int, ...]) -> Rollout:
    """Generate greedily until the response ends or has MAX_NEW_TOKENS tokens."""
    generator: Any = model  # its typed signature wants a protocol that the class does not declare
    ids: Tensor = generator.generate(
        torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return Rollout(ids, len(prompt), target_features(model, ids, layer_ids)[1])


def tokens_per_pass(
    head: DraftHead, embedding: Tensor, rollouts: list[Rollout], shape: TreeShape
) -> float:
    """Return decoded tokens per target pass.

    The first token is prefill's and does not count; the last short pass of each response does.
    """
    tokens = sum(rollout.ids.shape[1] - rollout.prompt_length - 1 for rollout in rollouts)
    passes = sum(
        target_passes(head, embedding, r.ids, r.features, r.prompt_length, shape) for r in rollouts
    )
    return tokens / passes


def measure(
    model_folder: Path, draft_folder: Path, *, prompts: int, shapes: Mapping[str, TreeShape]
) -> dict[str, Any]:
    """Return tokens per target pass for each shape, over held-out `corpus.speculation_prompts`."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    model = Qwen3_5ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    head = load_draft(draft_folder)
    embedding = model.model.embed_tokens.weight.detach()
    rollouts = [
        roll_out(model, tokenizer.encode(item.prompt).ids, head.config.aux_layer_ids)
        for item in corpus.speculation_prompts(prompts, seed=0)
    ]
    answer_tokens = sum(rollout.ids.shape[1] - rollout.prompt_length for rollout in rollouts)
    return {
        "prompts": prompts,
        "mean_answer_tokens": round(answer_tokens / prompts, 1),
        "tokens_per_pass": {
            name: round(tokens_per_pass(head, embedding, rollouts, shape), 3)
            for name, shape in shapes.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--draft", type=Path, default=Path("demo/draft"))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = measure(args.model, args.draft, prompts=args.prompts, shapes=SHAPES)
    (args.draft / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
