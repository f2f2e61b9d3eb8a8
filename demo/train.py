"""Trains the demo model: `python -m demo.train --out demo/model`. Seeded; counts steps, not
seconds.

A hybrid Qwen3.5 of about 2 M parameters (6 GatedDeltaNet layers, 2 gated full-attention layers)
learns the corpus of `demo.corpus` from scratch in fp32 and is stored in bf16. Prints one JSON line
per progress report, and one with the exact-answer rate on held-out recall questions. Needs the
`train` extra (transformers); serving does not.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from demo import corpus
from demo.initial import favour_recall, share_spaced_words

MAX_VOCAB_SIZE = 1024
KNOWN_WEIGHT = 1.0
UNKNOWN_WEIGHT = 0.05
RECALL_QUESTIONS = 200


@dataclass(frozen=True)
class Phase:
    """One phase of the curriculum.

    It has steps, row length in tokens, rows per step, longest story in facts, and share of tasks.
    """

    steps: int
    row_tokens: int
    rows: int
    max_facts: int
    task_share: float


CURRICULUM = (
    Phase(150, 96, 24, 3, 0.05),
    Phase(350, 160, 14, 5, 0.1),
    Phase(400, 256, 8, 7, 0.15),
    Phase(100, 384, 6, 9, 0.15),
)


def train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of the corpus.

    Any text can be encoded, and corpus words are single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    stream = corpus.documents(0, max_facts=6, task_share=0.2)
    texts = ["".join(piece.text for piece in next(stream)) for _ in range(4000)]
    for special in corpus.SPECIAL_TOKENS:
        texts = [text.replace(special, "\n") for text in texts]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=MAX_VOCAB_SIZE,
            special_tokens=corpus.SPECIAL_TOKENS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def build_model(vocab_size: int) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=[0, 3],
        pad_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config)
    favour_recall(model)
    return model


def batches(tokenizer: Tokenizer, phase: Phase, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens [rows, T + 1] and the weight of each predicted token [rows, T], without end.

    Every row starts a document.
    """
    stream = corpus.documents(seed, max_facts=phase.max_facts, task_share=phase.task_share)
    while True:
        rows = []
        weights = []
        for _ in range(phase.rows):
            ids: list[int] = []
            weight: list[float] = []
            while len(ids) <= phase.row_tokens:
                for piece in next(stream):
                    encoded = tokenizer.encode(piece.text).ids
                    ids += encoded
                    weight += [KNOWN_WEIGHT if piece.known else UNKNOWN_WEIGHT] * len(encoded)
            rows.append(ids[: phase.row_tokens + 1])
            weights.append(weight[1 : phase.row_tokens + 1])
        yield torch.tensor(rows), torch.tensor(weights)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the rest; "base" keeps each group's base rate."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (
            matrices
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            else rest
        ).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.97), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, total: int) -> None:
    """Warm up over 30 steps, then fall linearly to 2 %."""
    scale = min((step + 1) / 30, max(0.02, 1 - step / total))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * scale


@torch.no_grad()
def recall_rate(
    model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, questions: list[corpus.RecallQuestion]
) -> float:
    """Return the share of questions answered exactly by greedy decoding.

    One teacher-forced pass decides: the greedy continuation equals the answer if and only if every
    answer token is the argmax after its true prefix. Rows are padded on the right, which a causal
    model does not see.
    """
    prompts = [tokenizer.encode(question.prompt).ids for question in questions]
    answers = [tokenizer.encode(question.answer).ids for question in questions]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    best = model(nn.utils.rnn.pad_sequence(rows, batch_first=True), use_cache=False).logits.argmax(
        -1
    )
    right = sum(
        row[len(prompt) - 1 : len(prompt) - 1 + len(answer)].tolist() == answer
        for row, prompt, answer in zip(best, prompts, answers, strict=True)
    )
    return float(right / len(questions))


def train(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, curriculum: tuple[Phase, ...]) -> float:
    """Train in place and print a line every 20 steps.

    Return the last phase's mean loss on known tokens, in nats.
    """
    optimizers = make_optimizers(model)
    total = sum(phase.steps for phase in curriculum)
    step = 0
    tokens = 0
    began = time.monotonic()
    for seed, phase in enumerate(curriculum, start=1):
        stream = batches(tokenizer, phase, seed)
        losses: list[float] = []
        for _ in range(phase.steps):
            ids, weight = next(stream)
            set_rate(optimizers, step, total)
            losses.append(train_step(model, optimizers, ids, weight))
            step = step + 1
            tokens = tokens + weight.numel()
            if step % 20 == 0:
                recent = losses[-20:]
                print(
                    json.dumps(
                        {
                            "step": step,
                            "of": total,
                            "phase": seed,
                            "answer_loss": round(sum(recent) / len(recent), 4),
                            "tokens_per_s": round(tokens / (time.monotonic() - began)),
                        }
                    ),
                    flush=True,
                )
            if step % 100 == 0:
                questions = corpus.recall_questions(50, seed=1, max_facts=min(6, phase.max_facts))
                print(
                    json.dumps({"step": step, "recall": recall_rate(model, tokenizer, questions)}),
                    flush=True,
                )
    return sum(losses) / len(losses)


def train_step(
    model: Qwen3_5ForCausalLM, optimizers: list[torch.optim.Optimizer], ids: Tensor, weight: Tensor
) -> float:
    """Run one optimization step on a batch; return the mean loss on known tokens, in nats."""
    logits = model(ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
        weight
    )
    known = loss[weight == KNOWN_WEIGHT].mean().item()
    torch.autograd.backward((loss * weight).sum() / weight.sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return known


def save(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a checkpoint in the hub's format, with weights in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=corpus.END
    )
    wrapped.chat_template = corpus.CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    model.bfloat16().save_pretrained(out)


def measure_recall(folder: Path, *, questions: int) -> dict[str, float]:
    """Return the exact-answer rate of the stored bf16 model on held-out questions.

    Stories have two to six facts. "recall": no word repeats in a story. "recall_repeated_words":
    two facts may share verb, color or place.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    distinct = corpus.recall_questions(questions, seed=0, max_facts=6)
    repeated = corpus.recall_questions(questions, seed=0, max_facts=6, make=corpus.make_facts)
    return {
        "recall_questions": questions,
        "recall": recall_rate(model, tokenizer, distinct),
        "recall_repeated_words": recall_rate(model, tokenizer, repeated),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    model = build_model(-(-tokenizer.get_vocab_size() // 16) * 16)
    share_spaced_words(model, tokenizer)
    loss = train(model, tokenizer, CURRICULUM)
    save(model, tokenizer, args.out)
    figures = {
        "date": date.today().isoformat(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": tokenizer.get_vocab_size(),
        "steps": sum(phase.steps for phase in CURRICULUM),
        "tokens_seen": sum(phase.steps * phase.rows * phase.row_tokens for phase in CURRICULUM),
        "answer_loss": round(loss, 4),
        **measure_recall(args.out, questions=RECALL_QUESTIONS),
    }
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
