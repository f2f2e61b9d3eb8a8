"""A NextN layer by its formulas, slot by slot: latent attention with heads written out, a choice of
keys, experts."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.memory.layout import CacheKind
from engine.speculative.contracts.draft_model import DraftModel
from tests.support.drafts.tree_oracle import Cached, TreeOracle


@dataclass
class NextNOracle(TreeOracle):
    """`cached` are the (latent, rotated key part, index key) of the slots so far; `layer_id` of
    several layers. fp64 throughout."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    layer_id: int = 0

    @classmethod
    def of(cls, folder: Path, layer_id: int = 0) -> "NextNOracle":
        config = json.loads((folder / "config.json").read_text())
        tensors = {
            name: tensor.double()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        return cls(config, tensors, layers=(config["num_hidden_layers"] - 1,), layer_id=layer_id)

    def first_hidden(self, feature: Tensor) -> Tensor:
        return _normed(
            feature.double(), self.tensors["model.norm.weight"], self.config["rms_norm_eps"]
        )

    def log_p(self, hidden: Tensor) -> Tensor:
        return (self.tensors["lm_head.weight"] @ hidden).log_softmax(-1)

    def step(
        self, token: int, hidden: Tensor, position: int, cached: Cached
    ) -> tuple[Tensor, Cached]:
        embedding = self.tensors["model.embed_tokens.weight"][token]
        x = self._linear(
            "eh_proj",
            torch.cat([self._own_norm("enorm", embedding), self._own_norm("hnorm", hidden)]),
        )
        mixed, cached = self._attend(self._own_norm("input_layernorm", x), position, cached)
        x = x + mixed
        x = x + self._experts(self._own_norm("post_attention_layernorm", x))
        return self._own_norm("shared_head.norm", x), cached

    def _attend(self, x: Tensor, position: int, cached: Cached) -> tuple[Tensor, Cached]:
        config = self.config
        heads, nope, rope = (
            config[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        query_latent = self._latent_norm("q_a_layernorm", self._linear("self_attn.q_a_proj", x))
        query = self._linear("self_attn.q_b_proj", query_latent).view(heads, nope + rope)
        latent, key_rope = torch.split(
            self._linear("self_attn.kv_a_proj_with_mqa", x), [config["kv_lora_rank"], rope]
        )
        latent = self._latent_norm("kv_a_layernorm", latent)
        index_query, index_key, weights = self._indexed(x, query_latent, position)
        cached = [*cached, (latent, self._rotate_pairs(key_rope, position), index_key)]
        slots = self._chosen(index_query, weights, cached)
        up = self._own("self_attn.kv_b_proj").view(heads, nope + config["v_head_dim"], -1)
        latents = torch.stack([cached[slot][0] for slot in slots])
        keys = torch.einsum("hdr,sr->hsd", up[:, :nope], latents)
        values = torch.einsum("hdr,sr->hsd", up[:, nope:], latents)
        rotated = torch.stack([cached[slot][1] for slot in slots])
        query_rope = self._rotate_pairs(query[:, nope:], position)
        scores = torch.einsum("hd,hsd->hs", query[:, :nope], keys) + query_rope @ rotated.t()
        out = torch.einsum("hs,hsd->hd", (scores / math.sqrt(nope + rope)).softmax(-1), values)
        return self._linear("self_attn.o_proj", out.flatten()), cached

    def _indexed(
        self, x: Tensor, query_latent: Tensor, position: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index key; empty without an indexer."""
        if not self.config.get("index_topk"):
            return (torch.empty(0),) * 3
        heads, dim = self.config["index_n_heads"], self.config["index_head_dim"]
        query = self._linear("self_attn.indexer.wq_b", query_latent).view(heads, dim)
        key = self._linear("self_attn.indexer.wk", x)
        key = (key - key.mean()) * torch.rsqrt(key.var(correction=0) + 1e-6)
        key = key * self._own("self_attn.indexer.k_norm") + self._own(
            "self_attn.indexer.k_norm", "bias"
        )
        weights = self._linear("self_attn.indexer.weights_proj", x) * heads**-0.5
        return self._rotate_index(query, position), self._rotate_index(key, position), weights

    def _chosen(self, query: Tensor, weights: Tensor, cached: Cached) -> list[int]:
        if not self.config.get("index_topk"):
            return list(range(len(cached)))
        scores = [
            float((weights * torch.relu(query @ key * len(key) ** -0.5)).sum())
            for _, _, key in cached
        ]
        best = sorted(range(len(cached)), key=lambda slot: (-scores[slot], slot))
        return sorted(best[: self.config["index_topk"]])

    def _experts(self, x: Tensor) -> Tensor:
        config = self.config
        scores = torch.sigmoid(self._linear("mlp.gate", x))
        ranked = scores + self._own("mlp.gate.e_score_correction_bias", "")
        groups = ranked.view(config.get("n_group") or 1, -1)
        best = (
            groups.topk(2, -1).values.sum(-1).topk(config.get("topk_group") or 1).indices.tolist()
        )
        size = groups.shape[1]
        open_to = [expert for expert in range(len(scores)) if expert // size in best]
        chosen = sorted(open_to, key=lambda expert: -float(ranked[expert]))[
            : config["num_experts_per_tok"]
        ]
        total = sum(float(scores[expert]) for expert in chosen) + 1e-20
        out = self._feed_forward("mlp.shared_experts", x)
        for expert in chosen:
            share = float(scores[expert]) / total * config["routed_scaling_factor"]
            out = out + share * self._feed_forward(f"mlp.experts.{expert}", x)
        return out

    def _feed_forward(self, name: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(f"{name}.gate_proj", x))
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))

    def _rotate_index(self, x: Tensor, position: int) -> Tensor:
        """Rotate the first dimensions: GLM-5 rotates pairs, DeepSeek-V3.2 halves."""
        size = self.config["qk_rope_head_dim"]
        turned, rest = x[..., :size], x[..., size:]
        if self.config["model_type"] == "glm_moe_dsa":
            return torch.cat([self._rotate_pairs(turned, position), rest], -1)
        order = [place for pair in range(size // 2) for place in (pair, pair + size // 2)]
        paired = self._rotate_pairs(turned[..., order], position)
        return torch.cat([paired[..., 0::2], paired[..., 1::2], rest], -1)

    def _rotate_pairs(self, x: Tensor, position: int) -> Tensor:
        """Rotate dimensions 2i and 2i + 1 by position * theta^(-2i / size)."""
        size = x.shape[-1]
        angles = position * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack(
            [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1
        ).flatten(-2)

    def _own(self, name: str, part: str = "weight") -> Tensor:
        key = f"model.layers.{self.config['num_hidden_layers'] + self.layer_id}.{name}"
        return self.tensors[f"{key}.{part}" if part else key]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._own(name) @ x

    def _own_norm(self, name: str, x: Tensor) -> Tensor:
        return _normed(x, self._own(name), self.config["rms_norm_eps"])

    def _latent_norm(self, name: str, x: Tensor) -> Tensor:
        return _normed(x, self._own(f"self_attn.{name}"), 1e-6)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean() + eps)


def nan_pools(
    model: DraftModel, page_size: int, num_pages: int
) -> dict[CacheKind, dict[int, Tensor]]:
    """Return a draft's pools in which every unwritten byte is NaN."""
    pools: dict[CacheKind, dict[int, Tensor]] = {kind: {} for kind in CacheKind}
    for spec in model.cache_specs(page_size):
        pools[spec.kind][spec.layer_id] = torch.full(
            (num_pages, *spec.record_shape), math.nan, dtype=getattr(torch, spec.dtype)
        )
    return pools
