"""An EAGLE-3 draft by its formulas, slot by slot, without pages, plans or batches: the oracle of the served one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.batch import ForwardBatch, ForwardMode
from engine.model import StageOutput
from engine.speculative.drafter import Drafter
from engine.speculative.verify import Run
from engine.trees import SpecInfo, TokenTree
from models.weights import RandomWeights
from tests.support.drafters import Shape

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, WIDTH = 4, 2, 32, 64, 256, 96
LAYERS = (1, 2, 4)
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
}
SHAPES = {
    "fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,),
    "layers.0.input_layernorm.weight": (HIDDEN,), "layers.0.hidden_norm.weight": (HIDDEN,),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "layers.0.mlp.gate_proj.weight": (WIDTH, HIDDEN), "layers.0.mlp.up_proj.weight": (WIDTH, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, WIDTH),
}


def random_tensors(*, tied_head: bool) -> dict[str, Tensor]:
    """The draft's own tensors, as `random_draft` makes them, with embedding and head of the random target."""
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    for name, tensor in tensors.items():
        RandomWeights(seed=1).read(name, tensor)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.empty(VOCAB, HIDDEN)
        RandomWeights(seed=0).read("embed_tokens.weight" if tied_head else name, tensors[name])
    return tensors


def save_draft(folder: Path, *, layers: tuple[int, ...] = LAYERS, prefix: str = "midlayer.",
               kept_ids: Sequence[int] = ()) -> Path:
    """Write a random draft as public files have it. `kept_ids`: the target's tokens in a smaller vocabulary."""
    folder.mkdir(parents=True)
    tensors = {name.replace("layers.0.", prefix): tensor for name, tensor in random_tensors(tied_head=False).items()
               if name != "embed_tokens.weight"}
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
class Eagle3Oracle:
    """`cached` are the (key, value) [kv heads, D] of the slots so far."""

    tensors: Mapping[str, Tensor]

    def step(self, token: int, hidden: Tensor, position: int,
             cached: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One slot after those in `cached`; returns its hidden state [H] and the longer cache."""
        w = self.tensors
        x = torch.cat([self._norm("layers.0.input_layernorm", w["embed_tokens.weight"][token]),
                       self._norm("layers.0.hidden_norm", hidden)])
        q, k, v = (self._linear(f"layers.0.self_attn.{part}_proj", x).view(-1, HEAD_DIM) for part in "qkv")
        cached = [*cached, (_rotate(k, position), v)]
        keys = torch.stack([k for k, _ in cached], 1).repeat_interleave(HEADS // KV_HEADS, 0)  # [heads, slots, D]
        values = torch.stack([v for _, v in cached], 1).repeat_interleave(HEADS // KV_HEADS, 0)
        scores = (keys @ _rotate(q, position)[..., None])[..., 0] / math.sqrt(HEAD_DIM)
        mixed = (scores.softmax(-1)[:, None] @ values)[:, 0].flatten()
        hidden = hidden + self._linear("layers.0.self_attn.o_proj", mixed)
        x = self._norm("layers.0.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self._linear("layers.0.mlp.gate_proj", x))
        return hidden + self._linear("layers.0.mlp.down_proj", gate * self._linear("layers.0.mlp.up_proj", x)), cached

    def tree(self, features: Sequence[Tensor], tokens: Sequence[int], start: int, shape: Shape) -> TokenTree:
        """The tree after slots of these features [3 * target hidden] and next tokens, at positions from `start` on."""
        cached: list[tuple[Tensor, Tensor]] = []
        hidden = torch.empty(0)
        for offset, (feature, token) in enumerate(zip(features, tokens, strict=True)):
            hidden, cached = self.step(token, self._linear("fc", feature), start + offset, cached)
        position = start + len(tokens)
        # (score, created, token, parent, hidden it was predicted from, cache before it)
        found: list[tuple[float, int, int, int, Tensor, list[tuple[Tensor, Tensor]]]] = []
        frontier = self._children(found, -1, 0.0, hidden, cached, shape.width)
        for _ in range(shape.depth - 1):
            grown = []
            for node in frontier:
                score, _, token, _, before, cache = found[node]
                depth = len(cache) - len(cached)
                after, longer = self.step(token, before, position + depth, cache)
                grown += self._children(found, node, score, after, longer, shape.width)
            frontier = sorted(grown, key=lambda node: (-found[node][0], node))[:shape.width]
        best = sorted(sorted(range(len(found)), key=lambda node: (-found[node][0], node))[:shape.nodes])
        place = {old: new for new, old in enumerate(best)} | {-1: -1}
        return TokenTree(tuple(found[node][2] for node in best), tuple(place[found[node][3]] for node in best))

    def _children(self, found: list[tuple[float, int, int, int, Tensor, list[tuple[Tensor, Tensor]]]], parent: int,
                  score: float, hidden: Tensor, cached: list[tuple[Tensor, Tensor]], width: int) -> list[int]:
        log_p = self._linear("lm_head", self._norm("norm", hidden)).log_softmax(-1)
        values, tokens = log_p.topk(width)
        first = len(found)
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
            found.append((score + value, len(found), token, parent, hidden, cached))
        return list(range(first, len(found)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] @ x

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] * x * torch.rsqrt(x.square().mean() + 1e-6)


def _rotate(x: Tensor, position: int) -> Tensor:
    half = HEAD_DIM // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)


@dataclass
class CheckedDrafter:
    """A drafter of which every fourth tree is compared with the oracle's, grown from all the slots of the request.

    Trees may differ where two candidates score alike but for rounding; `num_equal` of `num_trees` were the same.
    """

    drafter: Drafter
    oracle: Eagle3Oracle
    shape: Shape
    slots: dict[int, list[tuple[int, Tensor, int]]] = field(default_factory=dict)  # (position, feature, next token)
    num_calls: int = 0
    num_trees: int = 0
    num_equal: int = 0

    def propose(self, batch: ForwardBatch, output: StageOutput, runs: Sequence[Run]) -> list[TokenTree]:
        trees = self.drafter.propose(batch, output, runs)
        assert isinstance(batch.spec_info, SpecInfo)
        self._follow(batch, output, {run.row: run for run in runs})
        for run, tree in zip(runs, trees, strict=True):
            if not batch.spec_info.rows[run.row].num_draft_tokens:
                assert tree == TokenTree()
                continue
            slots = self.slots[batch.request_ids[run.row]]
            self.num_calls += 1
            if self.num_calls % 4:
                continue  # the oracle takes its time
            expected = self.oracle.tree([feature for _, feature, _ in slots], [token for _, _, token in slots],
                                        slots[0][0], self.shape)
            self.num_trees += 1
            self.num_equal += tree == expected
        return trees

    def _follow(self, batch: ForwardBatch, output: StageOutput, runs: Mapping[int, Run]) -> None:
        assert isinstance(batch.spec_info, SpecInfo)
        features = torch.cat([output.aux_hidden[layer_id] for layer_id in LAYERS], -1)
        tokens, first = batch.spec_info.token_ids.tolist(), 0
        for row, (key, length, start) in enumerate(zip(batch.request_ids, batch.query_lens, batch.context_lens,
                                                       strict=True)):
            run, spec = runs.get(row), batch.spec_info.rows[row]
            verified = run is not None and batch.mode is ForwardMode.VERIFY
            nodes = list(run.accepted) if run is not None and verified else list(range(length))
            following = [tokens[first + node] for node in nodes[1:]]
            following.append(run.tokens[-1].token_id if run is not None else spec.next_token_id or 0)
            kept = [slot for slot in self.slots.get(key, []) if slot[0] < start]  # a replay begins again
            if start < spec.draft_start or not spec.num_draft_tokens:
                kept, nodes, following = [], [], []
            kept = [slot for slot in kept if slot[0] >= spec.draft_start]
            self.slots[key] = kept + [(start + depth, features[first + node], token)
                                      for depth, (node, token) in enumerate(zip(nodes, following, strict=True))]
            first += length
