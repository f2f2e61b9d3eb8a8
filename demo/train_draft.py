"""Trains the demo model's EAGLE-3 draft: `python -m demo.train_draft --model demo/model --out
demo/draft`.

Seeded; counts steps. The head learns the target's next-token distribution on corpus documents. It
is unrolled over four steps, so that it learns from its own hidden states ("training-time test" of
the EAGLE-3 paper).
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM

from demo.draft import DraftConfig, DraftHead, DraftKV, save_draft
from demo.train import Phase, batches, make_optimizers, set_rate

AUX_LAYER_IDS = (1, 4, 6)
UNROLLED_STEPS = 4
STEP_DISCOUNT = 0.9
PHASE = Phase(700, 256, 8, 6, 0.25)
SEED = 1000


@torch.no_grad()
def target_features(
    model: Qwen3_5ForCausalLM, ids: Tensor, layer_ids: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return logits [rows, T, vocab] and the concatenated layer outputs [rows, T, 3 * hidden]."""
    out = model(ids, use_cache=False, output_hidden_states=True)
    return out.logits.float(), torch.cat([out.hidden_states[i + 1] for i in layer_ids], -1).float()


def unroll_mask(slots: int, steps: int) -> Tensor:
    """Return the attention mask of unrolled step `steps`.

    Slot i sees the true features of slots 0..i, then only its own earlier steps.
    """
    causal = torch.ones(slots, slots, dtype=torch.bool).tril()
    return torch.cat([causal, *[torch.eye(slots, dtype=torch.bool)] * steps], -1)


def unrolled_loss(
    head: DraftHead,
    embedding: Tensor,
    ids: Tensor,
    features: Tensor,
    target: Tensor,
    weight: Tensor,
) -> Tensor:
    """Return the cross-entropy against the target's distribution, summed over the unrolled steps.

    ids: [rows, T]; features: [rows, T, 3 * hidden]; target: probabilities [rows, T, vocab] of the
    token after each position; weight: [rows, T] of that token. At slot i, step j drafts token i + j
    + 2.
    """
    slots = ids.shape[1] - UNROLLED_STEPS
    hidden = head.fc(features[:, :slots])
    past: DraftKV | None = None
    total = torch.zeros(())
    for j in range(UNROLLED_STEPS):
        tokens = F.embedding(ids[:, 1 + j : 1 + j + slots], embedding)
        hidden, fresh = head(
            tokens, hidden, torch.arange(slots) + j, past=past, mask=unroll_mask(slots, j)
        )
        past = fresh if past is None else past.append(fresh)
        log_p = head.logits(hidden).log_softmax(-1)
        loss = -(target[:, 1 + j : 1 + j + slots] * log_p).sum(-1)
        counted = weight[:, 1 + j : 1 + j + slots]
        total = total + STEP_DISCOUNT**j * (loss * counted).sum() / counted.sum()
    return total


def train(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, head: DraftHead, steps: int) -> float:
    """Train the head; return the mean loss per unrolled step over the last tenth of the run."""
    embedding = model.model.embed_tokens.weight.detach()
    optimizers = make_optimizers(head)
    stream = batches(tokenizer, PHASE, SEED)
    began = time.monotonic()
    losses = []
    norm = sum(STEP_DISCOUNT**j for j in range(UNROLLED_STEPS))
    for step in range(steps):
        ids, weight = next(stream)
        ids = ids[:, :-1]
        set_rate(optimizers, step, steps)
        logits, features = target_features(model, ids, head.config.aux_layer_ids)
        loss = unrolled_loss(head, embedding, ids, features, logits.softmax(-1), weight)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() / norm)
        if (step + 1) % 20 == 0:
            print(
                json.dumps(
                    {
                        "step": step + 1,
                        "of": steps,
                        "loss": round(sum(losses[-20:]) / 20, 4),
                        "seconds": round(time.monotonic() - began),
                    }
                ),
                flush=True,
            )
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def make_head(model: Qwen3_5ForCausalLM) -> DraftHead:
    """Return a new head for this target; its lm_head starts as the target's."""
    config = model.config
    head = DraftHead(
        DraftConfig(
            vocab_size=config.vocab_size,
            aux_layer_ids=AUX_LAYER_IDS,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
        )
    )
    head.lm_head.weight.data.copy_(model.lm_head.weight.detach())
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=PHASE.steps)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = Qwen3_5ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    head = make_head(model)
    loss = train(model, tokenizer, head, args.steps)
    save_draft(head, args.out)
    print(
        json.dumps(
            {
                "parameters": sum(p.numel() for p in head.parameters()),
                "steps": args.steps,
                "loss": round(loss, 4),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
