"""An EAGLE-3 draft head as plain torch modules, for training and evaluation; serving has its own.

Slot t holds the target's features after token t (its hidden states after three layers) and the
embedding of token t + 1; it predicts token t + 2. Further steps use the head's own hidden state in
place of the target's (Li et al. 2025, "EAGLE-3"). Names and shapes are those of public llama_eagle3
checkpoints: `fc`, `midlayer.*`, `norm`, `lm_head`.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the head. It reads the output of the target layers `aux_layer_ids`."""

    vocab_size: int
    aux_layer_ids: tuple[int, int, int]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class DraftKV(NamedTuple):
    """Keys and values of earlier slots, each [rows, heads, slots, head_dim].

    Keys are already rotated.
    """

    keys: Tensor
    values: Tensor

    def append(self, other: "DraftKV") -> "DraftKV":
        return DraftKV(
            torch.cat([self.keys, other.keys], 2), torch.cat([self.values, other.values], 2)
        )

    def select(self, rows: Tensor) -> "DraftKV":
        return DraftKV(self.keys[rows], self.values[rows])

    def first(self, slots: int) -> "DraftKV":
        return DraftKV(self.keys[:, :, :slots], self.values[:, :, :slots])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class HeadAttention(nn.Module):
    """Attention over [embedding ; hidden], so its input is twice as wide as its output."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        inner = config.num_attention_heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * config.hidden_size, inner, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta

    def forward(
        self, x: Tensor, positions: Tensor, past: DraftKV | None, mask: Tensor
    ) -> tuple[Tensor, DraftKV]:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        fresh = DraftKV(self._rotate(k, positions), v)
        seen = past.append(fresh) if past is not None else fresh
        out = F.scaled_dot_product_attention(
            self._rotate(q, positions), seen.keys, seen.values, attn_mask=mask
        )
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended, fresh

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary embedding over the whole head, first half against second half."""
        half = self.head_dim // 2
        angles = positions[:, None] * self.rope_theta ** (-torch.arange(half) / half)
        low = x[..., :half]
        high = x[..., half:]
        return torch.cat(
            [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
        )


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.intermediate_size)
        self.gate_proj, self.up_proj = (nn.Linear(*sizes, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = HeadAttention(config)
        self.mlp = MLP(config)

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        past: DraftKV | None,
        mask: Tensor,
    ) -> tuple[Tensor, DraftKV]:
        x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)
        attended, fresh = self.self_attn(x, positions, past, mask)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), fresh


class DraftHead(nn.Module):
    """The draft head. It has no embedding: callers look tokens up in the target's."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(
            len(config.aux_layer_ids) * config.hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        *,
        past: DraftKV | None,
        mask: Tensor,
    ) -> tuple[Tensor, DraftKV]:
        """Run one step over T slots; return their new hidden states and their keys and values.

        Args:
            embedding: [rows, T, hidden_size], of the token after each slot.
            hidden: [rows, T, hidden_size], `fc` of the target's features, or an earlier
                step's result.
            positions: [T].
            past: keys and values of earlier slots.
            mask: bool [T, past slots + T], true where a slot may attend.
        """
        out: tuple[Tensor, DraftKV] = self.midlayer(embedding, hidden, positions, past, mask)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token that each slot predicts: [..., vocab_size]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


def save_draft(head: DraftHead, out: Path) -> None:
    """Write bf16 weights and a config in the format of public EAGLE-3 checkpoints.

    Layer id j means "output of layer j".
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    sizes = asdict(head.config)
    layer_ids = list(sizes.pop("aux_layer_ids"))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        **sizes,
        "num_key_value_heads": head.config.num_attention_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "draft_vocab_size": head.config.vocab_size,
        "target_hidden_size": head.config.hidden_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "use_aux_hidden_state": True,
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_draft(folder: Path) -> DraftHead:
    """Load the head that `save_draft` wrote, in fp32."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    low, middle, high = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    head = DraftHead(
        DraftConfig(
            vocab_size=raw["vocab_size"],
            aux_layer_ids=(low, middle, high),
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            head_dim=raw["head_dim"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=raw["rope_theta"],
        )
    )
    head.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return head.eval()
