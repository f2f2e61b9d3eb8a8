"""EAGLE-1 against its formulas, slot by slot, through the drafter that serves it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.core.numerics import Numerics
from models.blocks.random_weights import RandomWeights
from models.drafts.loader import DraftDescription, read_draft
from tests.support.drafts.drafters import chain_behind
from tests.support.models.tiny_models import HIDDEN_SIZE as HIDDEN
from tests.support.models.tiny_models import LLAMA, tiny
from tests.support.models.tiny_models import VOCAB_SIZE as VOCAB

HEADS, KV_HEADS, DIM, WIDTH, LAST = 4, 2, 32, 100, 4
QWEN2 = "Qwen2ForCausalLMEagle"


def write(folder: Path, architecture: str) -> tuple[DraftDescription, dict[str, Tensor]]:
    """Write a random draft to disk; return its description and its tensors with those it takes from
    the target."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (WIDTH, HIDDEN),
        "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH),
    }
    tensors = {
        f"layers.0.{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = (
        torch.rand(HIDDEN, generator=generator) + 0.5
    )
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1
    tensors["fc.bias"] = torch.randn(HIDDEN, generator=generator)
    if architecture == QWEN2:
        tensors |= {
            f"layers.0.self_attn.{part}_proj.bias": torch.randn(
                shapes[f"self_attn.{part}_proj"][0], generator=generator
            )
            for part in "qkv"
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": [architecture],
                "hidden_size": HIDDEN,
                "intermediate_size": WIDTH,
                "num_hidden_layers": 1,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": DIM,
                "vocab_size": VOCAB,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "max_position_embeddings": 512,
                "torch_dtype": "float32",
            }
        )
    )
    for name in ("embed_tokens.weight", "lm_head.weight"):  # of the target
        tensors[name] = torch.empty(VOCAB, HIDDEN)
        RandomWeights(seed=0).read(name, tensors[name])
    return read_draft(folder, tiny(LLAMA)), tensors


def step(
    w: Mapping[str, Tensor],
    token: int,
    hidden: Tensor,
    position: int,
    cached: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Run one slot: append its key and value to `cached` and return its hidden state."""
    x = w["fc.weight"] @ torch.cat([w["embed_tokens.weight"][token], hidden]) + w["fc.bias"]
    q, k, v = (
        (
            w[f"layers.0.self_attn.{part}_proj.weight"] @ x
            + w.get(f"layers.0.self_attn.{part}_proj.bias", torch.zeros(()))
        ).view(-1, DIM)
        for part in "qkv"
    )
    cached.append((rotate(k, position), v))
    keys = torch.stack([key for key, _ in cached], 1).repeat_interleave(HEADS // KV_HEADS, 0)
    values = torch.stack([value for _, value in cached], 1).repeat_interleave(HEADS // KV_HEADS, 0)
    scores = (keys @ rotate(q, position)[..., None])[..., 0] / math.sqrt(DIM)
    mixed = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
    x = x + w["layers.0.self_attn.o_proj.weight"] @ mixed
    normed = (
        w["layers.0.post_attention_layernorm.weight"] * x * torch.rsqrt(x.square().mean() + 1e-6)
    )
    gate = torch.nn.functional.silu(w["layers.0.mlp.gate_proj.weight"] @ normed)
    return x + w["layers.0.mlp.down_proj.weight"] @ (
        gate * (w["layers.0.mlp.up_proj.weight"] @ normed)
    )


def rotate(x: Tensor, position: int) -> Tensor:
    angles = position * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
    )


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", QWEN2])
def test_chains_are_the_formulas(tmp_path: Path, architecture: str) -> None:
    description, tensors = write(tmp_path / "draft", architecture)
    assert description.capture_layers == {LAST}
    model = description.load(numerics=Numerics.EXACT)
    prompt, drawn = list(range(30, 53)), 99
    target_hidden = torch.randn(len(prompt), HIDDEN, generator=torch.Generator().manual_seed(5))
    tree = chain_behind(model, model.cache_specs(16), prompt, drawn, {LAST: target_hidden})

    cached: list[tuple[Tensor, Tensor]] = []
    features = target_hidden * torch.rsqrt(
        target_hidden.square().mean(-1, keepdim=True) + 1e-6
    )  # the norm's w is 1
    hidden = torch.empty(0)
    for position, token in enumerate([*prompt[1:], drawn]):
        hidden = step(tensors, token, features[position], position, cached)
    expected = []
    for position in range(len(prompt), len(prompt) + 4):
        expected.append(int((tensors["lm_head.weight"] @ hidden).argmax()))
        hidden = step(tensors, expected[-1], hidden, position, cached)
    assert list(tree.token_ids) == expected
