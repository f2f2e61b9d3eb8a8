"""Qwen3.5's MTP layer against one composed of the transformers parts, through the drafter that
serves it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5TextRotaryEmbedding,
)

from engine.core.numerics import Numerics
from engine.memory.layout import CacheKind
from models.blocks.random_weights import RandomWeights
from models.drafts.loader import random_draft, read_draft
from runtime.errors import ConfigError
from tests.support.drafts.drafters import chain_behind
from tests.support.models.checkpoints import spread_weights
from tests.support.models.tiny_models import HIDDEN_SIZE as HIDDEN
from tests.support.models.tiny_models import HYBRID, LLAMA, QWEN3_NEXT, tiny
from tests.support.models.tiny_models import VOCAB_SIZE as VOCAB

LAST, FULL = 4, 1


class Oracle:
    """The layer with its norms, over whole sequences and without a cache."""

    def __init__(self) -> None:
        kept = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_parameters",
            "layer_types",
        )
        fields: dict[str, Any] = {name: HYBRID[name] for name in kept}
        config: Any = Qwen3_5TextConfig(**fields)
        config._attn_implementation = "eager"
        self.layer: Any = Qwen3_5DecoderLayer(config, FULL)
        spread_weights(self.layer)
        self._rotary: Any = Qwen3_5TextRotaryEmbedding(config)
        generator = torch.Generator().manual_seed(8)
        self.own = {
            name: torch.randn(HIDDEN, generator=generator) * 0.1
            for name in ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
        }
        self.own["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1
        self.embedding = torch.empty(VOCAB, HIDDEN)  # the target's, which is its head too
        RandomWeights(seed=0).read("embed_tokens.weight", self.embedding)

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        tensors = {
            f"mtp.layers.0.{name}": tensor.clone()
            for name, tensor in self.layer.state_dict().items()
        }
        tensors |= {f"mtp.{name}": tensor for name, tensor in self.own.items()}
        save_file(
            {**tensors, "model.norm.weight": torch.zeros(HIDDEN)}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({**HYBRID, "torch_dtype": "float32"}))
        return folder

    def norm(self, x: Tensor, name: str | None = None) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        # The random target's own norms have w = 1, which counts as 1 + w.
        return scaled * (2.0 if name is None else 1 + self.own[f"{name}.weight"])

    @torch.no_grad()
    def run(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Return the last slot's result [H] for hidden [slots, H]."""
        embedded = self.norm(self.embedding[tokens], "pre_fc_norm_embedding")
        x = (
            torch.cat([embedded, self.norm(hidden, "pre_fc_norm_hidden")], -1)
            @ self.own["fc.weight"].t()
        )
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        out = self.layer(
            x[None],
            position_embeddings=self._rotary(x[None], positions),
            attention_mask=mask,
            position_ids=positions,
        )
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return self.norm(found.reshape(-1, HIDDEN)[-1], "norm")


def test_chains_are_those_of_transformers(tmp_path: Path) -> None:
    oracle = Oracle()
    description = read_draft(oracle.save(tmp_path / "model"), tiny(HYBRID))
    assert description.capture_layers == {LAST}
    model = description.load(numerics=Numerics.EXACT)
    prompt, drawn = list(range(30, 53)), 99
    target_hidden = torch.randn(len(prompt), HIDDEN, generator=torch.Generator().manual_seed(5))
    tree = chain_behind(model, description.cache_specs(16), prompt, drawn, {LAST: target_hidden})

    tokens, hidden, expected = [*prompt[1:], drawn], oracle.norm(target_hidden), []
    for _ in range(4):
        last = oracle.run(tokens, hidden)
        expected.append(int((oracle.embedding @ last).argmax()))
        tokens, hidden = [*tokens, expected[-1]], torch.cat([hidden, last[None]])
    assert list(tree.token_ids) == expected


def test_a_checkpoint_without_mtp_is_no_draft(tmp_path: Path) -> None:
    folder = Oracle().save(tmp_path / "model")
    save_file({"model.norm.weight": torch.zeros(HIDDEN)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensors of a draft"):
        read_draft(folder, tiny(HYBRID))


def test_the_layer_of_another_family_is_refused(tmp_path: Path) -> None:
    folder = Oracle().save(tmp_path / "model")
    with pytest.raises(ConfigError, match="tensors do not fit"):
        read_draft(folder, tiny(LLAMA)).load(numerics=Numerics.EXACT)


def test_the_layer_of_qwen3_next_is_its_full_attention_with_experts() -> None:
    target = tiny(QWEN3_NEXT)
    draft = random_draft(QWEN3_NEXT, target, numerics=Numerics.EXACT)
    assert draft.capture_layers == {LAST}
    assert [spec.kind for spec in draft.cache_specs(16)] == [CacheKind.KV]
