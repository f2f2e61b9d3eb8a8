"""Trains the demo model: `python -m demo.train --out demo/model`. Seeded; counts steps, never seconds.

A hybrid Qwen3.5 of about 2 M parameters (6 GatedDeltaNet layers, 2 gated full-attention layers) learns the corpus of
`demo.corpus` from scratch in fp32 and is stored in bf16. Prints one JSON line per progress report and one with the
exact-answer rate on held-out recall questions. Needs the `train` extra (transformers); serving does not.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from demo import corpus

MAX_VOCAB_SIZE = 1024
CHUNK = 64
KNOWN_WEIGHT, UNKNOWN_WEIGHT = 1.0, 0.1


@dataclass(frozen=True)
class Phase:
    """A part of the curriculum: how many steps, row length in tokens, rows per step, longest story in facts."""

    steps: int
    row_tokens: int
    rows: int
    max_facts: int


CURRICULUM = (Phase(700, 160, 20, 3), Phase(800, 256, 12, 5), Phase(500, 448, 7, 9))


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE over the corpus; any text can be encoded, corpus words are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    stream = corpus.documents(0, 6)
    texts = ["".join(piece.text for piece in next(stream)) for _ in range(4000)]
    for special in corpus.SPECIAL_TOKENS:
        texts = [text.replace(special, "\n") for text in texts]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE, special_tokens=corpus.SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def build_model(vocab_size: int) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        bos_token_id=None, eos_token_id=[0, 3], pad_token_id=None)
    return Qwen3_5ForCausalLM(config)


def chunked_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, None]:
    """GatedDeltaNet over whole rows from a zero state, as in transformers' fallback but with one triangular solve
    per 64-token chunk instead of 63 Python steps (Yang et al. 2024, "Gated Delta Networks"; about 3x faster here).

    query, key: [rows, T, key heads, dk]; value: [rows, T, heads, dv]; g (log decay), beta: [rows, T, heads].
    """
    (rows, length, _, dk), heads = key.shape, value.shape[2]
    pad = -length % CHUNK
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    query, key = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key, value = (F.pad(x, (0, 0, 0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, CHUNK))
                         for x in (query * dk**-0.5, key, value))
    g, beta = (F.pad(x.float(), (0, 0, 0, pad)).transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta[..., None] * (key @ key.transpose(-1, -2)) * decay).tril(-1) + torch.eye(CHUNK)
    rhs = torch.cat([beta[..., None] * value, (beta * total.exp())[..., None] * key], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u, w = solved.split([value.shape[-1], dk], -1)
    scores = (query @ key.transpose(-1, -2)) * decay
    scaled_query = query * total.exp()[..., None]
    scaled_key = (key * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    carry = total[..., -1].exp()[..., None, None]
    state = value.new_zeros(rows, heads, dk, value.shape[-1])
    out = []
    for i in range(u.shape[2]):
        fresh = u[:, :, i] - w[:, :, i] @ state
        out.append(scaled_query[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = carry[:, :, i] * state + scaled_key[:, :, i] @ fresh
    return torch.stack(out, 2).flatten(2, 3)[:, :, :length].transpose(1, 2), None


def batches(tokenizer: Tokenizer, phase: Phase, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens [rows, T + 1], weight of each predicted token [rows, T]); every row starts a document."""
    stream = corpus.documents(seed, phase.max_facts)
    while True:
        rows, weights = [], []
        for _ in range(phase.rows):
            ids: list[int] = []
            weight: list[float] = []
            while len(ids) <= phase.row_tokens:
                for piece in next(stream):
                    encoded = tokenizer.encode(piece.text).ids
                    ids += encoded
                    weight += [KNOWN_WEIGHT if piece.known else UNKNOWN_WEIGHT] * len(encoded)
            rows.append(ids[:phase.row_tokens + 1])
            weights.append(weight[1:phase.row_tokens + 1])
        yield torch.tensor(rows), torch.tensor(weights)


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest; each group remembers its base rate under "base"."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.97), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, total: int) -> None:
    """Warm up over 30 steps, hold until 40 % of the run, then fall linearly to 2 %."""
    done = step / total
    scale = min(1.0, (step + 1) / 30) * (1.0 if done < 0.4 else max(0.02, (1 - done) / 0.6))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * scale


@torch.no_grad()
def recall_rate(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, count: int, max_facts: int) -> float:
    """Share of held-out questions answered exactly. One teacher-forced pass per question: the greedy continuation
    equals the answer if and only if every answer token is the argmax after its true prefix."""
    right = 0
    for question in corpus.recall_questions(count, seed=0, max_facts=max_facts):
        prompt, answer = tokenizer.encode(question.prompt).ids, tokenizer.encode(question.answer).ids
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        right += logits[len(prompt) - 1:-1].argmax(-1).tolist() == answer
    return right / count


def train(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, *, scale: float) -> None:
    optimizers = make_optimizers(model)
    phases = [Phase(max(1, round(p.steps * scale)), p.row_tokens, p.rows, p.max_facts) for p in CURRICULUM]
    total, step, tokens, began = sum(p.steps for p in phases), 0, 0, time.monotonic()
    for seed, phase in enumerate(phases, start=1):
        stream, losses = batches(tokenizer, phase, seed), []
        for in_phase in range(phase.steps):
            ids, weight = next(stream)
            set_rate(optimizers, step, total)
            logits = model(ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(weight)
            known = loss[weight == KNOWN_WEIGHT].mean().item()
            ((loss * weight).sum() / weight.sum()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step, tokens = step + 1, tokens + weight.numel()
            losses.append(known)
            if step % 20 == 0 or in_phase == phase.steps - 1:
                print(json.dumps({"step": step, "of": total, "phase": seed, "answer_loss": round(sum(losses) / len(losses), 4),
                                  "tokens_per_s": round(tokens / (time.monotonic() - began))}), flush=True)
                losses = []
            if step % 200 == 0:
                print(json.dumps({"step": step, "recall": recall_rate(model, tokenizer, 50, phase.max_facts)}), flush=True)


def save(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=corpus.END)
    wrapped.chat_template = corpus.CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    model.to(torch.bfloat16).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of every phase")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule
    tokenizer = train_tokenizer()
    model = build_model(-(-tokenizer.get_vocab_size() // 16) * 16)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "vocab": tokenizer.get_vocab_size()}), flush=True)
    train(model, tokenizer, scale=args.scale)
    save(model, tokenizer, args.out)
    stored = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16)
    print(json.dumps({"recall_bf16": recall_rate(stored, tokenizer, 200, 6), "questions": 200}), flush=True)


if __name__ == "__main__":
    main()
