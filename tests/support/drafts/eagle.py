"""An EAGLE-3 draft by its formulas, slot by slot, without pages, plans or batches: the oracle of
the served one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.blocks.random_weights import RandomWeights
from tests.support.drafts.tree_oracle import Cached, TreeOracle
from tests.support.models.tiny_models import HIDDEN_SIZE as HIDDEN
from tests.support.models.tiny_models import VOCAB_SIZE as VOCAB

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 32, 100
LAYERS = (1, 2, 4)
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "use_aux_hidden_state": True,
    },
}
SHAPES = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "norm.weight": (HIDDEN,),
    "layers.0.input_layernorm.weight": (HIDDEN,),
    "layers.0.hidden_norm.weight": (HIDDEN,),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
}


def random_tensors(*, tied_head: bool) -> dict[str, Tensor]:
    """Return the draft's own tensors, as `random_draft` makes them, with embedding and head of the
    random target."""
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    for name, tensor in tensors.items():
        RandomWeights(seed=1).read(name, tensor)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.empty(VOCAB, HIDDEN)
        RandomWeights(seed=0).read("embed_tokens.weight" if tied_head else name, tensors[name])
    return tensors


def save_draft(
    folder: Path,
    *,
    layers: tuple[int, ...] = LAYERS,
    prefix: str = "midlayer.",
    kept_ids: Sequence[int] = (),
) -> Path:
    """Write a random draft in the format of public files. `kept_ids`: the target's tokens in a
    smaller vocabulary."""
    folder.mkdir(parents=True)
    tensors = {
        name.replace("layers.0.", prefix): tensor
        for name, tensor in random_tensors(tied_head=False).items()
        if name != "embed_tokens.weight"
    }
    config = {**CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    if kept_ids:
        ids = torch.tensor(kept_ids)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].contiguous()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
        config["draft_vocab_size"] = len(ids)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Eagle3Oracle(TreeOracle):
    """`cached` are the (key, value) [kv heads, D] of the slots so far."""

    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...] = LAYERS

    def first_hidden(self, feature: Tensor) -> Tensor:
        return self._linear("fc", feature)

    def log_p(self, hidden: Tensor) -> Tensor:
        return self._linear("lm_head", self._norm("norm", hidden)).log_softmax(-1)

    def step(
        self, token: int, hidden: Tensor, position: int, cached: Cached
    ) -> tuple[Tensor, Cached]:
        """Run one slot after those in `cached`; return its hidden state [H] and the longer
        cache."""
        w = self.tensors
        x = torch.cat(
            [
                self._norm("layers.0.input_layernorm", w["embed_tokens.weight"][token]),
                self._norm("layers.0.hidden_norm", hidden),
            ]
        )
        q, k, v = (
            self._linear(f"layers.0.self_attn.{part}_proj", x).view(-1, HEAD_DIM) for part in "qkv"
        )
        cached = [*cached, (_rotate(k, position), v)]
        keys = torch.stack([k for k, _ in cached], 1).repeat_interleave(
            HEADS // KV_HEADS, 0
        )  # [heads, slots, D]
        values = torch.stack([v for _, v in cached], 1).repeat_interleave(HEADS // KV_HEADS, 0)
        scores = (keys @ _rotate(q, position)[..., None])[..., 0] / math.sqrt(HEAD_DIM)
        mixed = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
        hidden = hidden + self._linear("layers.0.self_attn.o_proj", mixed)
        x = self._norm("layers.0.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self._linear("layers.0.mlp.gate_proj", x))
        return hidden + self._linear(
            "layers.0.mlp.down_proj", gate * self._linear("layers.0.mlp.up_proj", x)
        ), cached

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] @ x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x * torch.rsqrt(x.square().mean() + 1e-6)


def _rotate(x: Tensor, position: int) -> Tensor:
    half = HEAD_DIM // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
    )
