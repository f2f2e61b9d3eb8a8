"""Mixture of experts: a router selects a few feed-forwards per token and weights their outputs.

There are three kinds of router:

    softmax   p = softmax(W x); the k largest; weights p, optionally renormalized over the selected
    sigmoid   s = sigmoid(W x); selected by s + bias, optionally only within the best groups of
              experts; weights s, optionally renormalized, times a scale
    input     the k largest of W x; an expert's input is s x, s = sigmoid(W x), and its output has
              no weight

A shared expert sees every token. Its output is added, in some families after its own sigmoid gate.

A token's sum is over its experts in ascending id, so its bits do not depend on other tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.model import ExpertTokens
from engine.core.layer_range import ONLY_RANK, Part, TensorRank
from engine.core.numerics import sigmoid
from models.blocks.config import RawConfig
from models.blocks.expert_layers import (
    ClampedExperts,
    ClampedSwiglu,
    ExpertLayers,
    ExpertShape,
    GatedExperts,
)
from models.blocks.linear import Homes, owners_of
from models.blocks.mlp import Mlp, MlpSpec
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights

# Names that some families of the sigmoid kind use for `n_routed_experts`.
_EXPERT_COUNTS = (
    "num_local_experts",
    "num_experts",
)


@dataclass(frozen=True)
class SoftmaxRouting:
    """A router that selects the most probable experts.

    With `renormalize` the weights of the selected experts add up to 1.
    """

    renormalize: bool

    def choose(self, logits: Tensor, *, num_chosen: int) -> tuple[Tensor, Tensor]:
        """Return weights fp32 and expert ids, [T, num_chosen] each, for logits [T, experts]."""
        weights, ids = logits.float().softmax(dim=-1).topk(num_chosen, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if self.renormalize else weights), ids


@dataclass(frozen=True)
class SigmoidRouting:
    """A router that scores experts by sigmoids.

    The experts are in `num_groups` equal groups. Only the `kept_groups` groups with the largest sum
    of their two best scores take part.
    """

    renormalize: bool
    scale: float
    num_groups: int
    kept_groups: int

    def choose(self, logits: Tensor, bias: Tensor, *, num_chosen: int) -> tuple[Tensor, Tensor]:
        """Return weights fp32 and expert ids, [T, num_chosen] each.

        `logits` is [T, experts] fp32, `bias` [experts] fp32.
        """
        scores = sigmoid(logits)
        ranked = scores + bias
        if self.kept_groups < self.num_groups:
            grouped = ranked.view(len(ranked), self.num_groups, -1)
            kept = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.kept_groups, dim=-1).indices
            dropped = torch.ones(grouped.shape[:2], dtype=torch.bool, device=kept.device).scatter_(
                1,
                kept,
                False,  # noqa: FBT003
            )
            ranked = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        ids = ranked.topk(num_chosen, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, ids


@dataclass(frozen=True)
class InputRouting:
    """A router that selects the highest logits and weights the inputs of experts."""

    def choose(self, logits: Tensor, *, num_chosen: int) -> tuple[Tensor, Tensor]:
        """Return weights fp32 of the inputs and expert ids, [T, num_chosen] each.

        `logits` is [T, experts].
        """
        best, ids = logits.topk(num_chosen, dim=-1)
        return sigmoid(best.float()), ids


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts.

    `shared_width` 0 means no shared expert. Softmax families have a gate for it, others do not.
    With `clamped` experts have that activation, and they and the router have biases.
    `experts_field` and `shared_field` are the config fields of the number of experts and of the
    shared width, for messages.
    """

    hidden_size: int
    num_experts: int
    num_chosen: int
    expert_width: int
    routing: SoftmaxRouting | SigmoidRouting | InputRouting
    shared_width: int = 0
    clamped: ClampedSwiglu | None = None
    rank: TensorRank = ONLY_RANK
    swaps_factors: bool = False  # `ExpertProjection.is_swapped` of its adapters
    experts_field: str = "num_experts"
    shared_field: str = "shared_expert_intermediate_size"

    # it reads back the number of tokens per expert, to run only experts that have tokens
    counts_on_host = True

    def __post_init__(self) -> None:
        """Check that the ranks can divide it.

        Raises:
            ConfigError: they cannot.
        """
        _ = self.shared, self.shares

    @property
    def experts(self) -> Part:
        """Return this rank's experts, which are whole; only the shared one is divided."""
        return self.shares[self.rank.rank]

    @property
    def shares(self) -> tuple[Part, ...]:
        """Return the experts of each rank."""
        return self.rank.parts(self.num_experts, f"experts ({self.experts_field})")

    @property
    def shared(self) -> MlpSpec | None:
        """Return the shared expert, if there is one."""
        if not self.shared_width:
            return None
        return MlpSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_width,
            rank=self.rank,
            field=self.shared_field,
        )

    def of_rank(self, rank: TensorRank) -> "MoeSpec":
        """Implement `FeedForwardSpec.of_rank`."""
        return replace(self, rank=rank)

    def build(self, weights: Weights) -> FeedForward:
        return Moe(spec=self, weights=weights)


def read_softmax_moe(raw: RawConfig, *, renormalize: bool, has_shared: bool) -> MoeSpec:
    """Read the fields of the Qwen families, Mixtral and gpt-oss.

    `num_local_experts` is the newer spelling of `num_experts`.
    """
    count = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    return _checked(
        raw,
        count,
        MoeSpec(
            hidden_size=raw.integer("hidden_size"),
            num_experts=raw.integer(count),
            experts_field=count,
            num_chosen=raw.integer("num_experts_per_tok"),
            expert_width=raw.integer("moe_intermediate_size"),
            routing=SoftmaxRouting(renormalize=renormalize),
            shared_width=raw.integer("shared_expert_intermediate_size") if has_shared else 0,
        ),
    )


def read_sigmoid_moe(raw: RawConfig) -> MoeSpec:
    """Read the fields of the DeepSeek and GLM families."""
    raw.require("scoring_func", only="sigmoid", default="sigmoid")
    raw.require("moe_layer_freq", only=1, default=1)
    width = raw.integer("moe_intermediate_size")
    routing = SigmoidRouting(
        renormalize=raw.flag("norm_topk_prob", default=True),
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.integer("n_group", 1),
        kept_groups=raw.integer("topk_group", 1),
    )
    spec = MoeSpec(
        hidden_size=raw.integer("hidden_size"),
        num_experts=raw.integer("n_routed_experts"),
        num_chosen=raw.integer("num_experts_per_tok"),
        expert_width=width,
        routing=routing,
        shared_width=width * raw.integer("n_shared_experts", 1, minimum=0),
        experts_field=next((name for name in _EXPERT_COUNTS if name in raw), "n_routed_experts"),
        shared_field="moe_intermediate_size times n_shared_experts",
    )
    if spec.num_experts % routing.num_groups or spec.num_experts // routing.num_groups < 2:
        raise raw.fail(
            "n_group",
            f"{routing.num_groups} must cut {spec.num_experts} experts into groups of 2 or more",
        )
    if routing.kept_groups > routing.num_groups:
        raise raw.fail(
            "topk_group", f"must be at most n_group {routing.num_groups}, is {routing.kept_groups}"
        )
    return _checked(raw, "n_routed_experts", spec)


def _checked(raw: RawConfig, field: str, spec: MoeSpec) -> MoeSpec:
    raw.require("hidden_act", only="silu", default="silu")
    if spec.num_chosen > spec.num_experts:
        raise raw.fail(
            "num_experts_per_tok",
            f"must be at most {field} {spec.num_experts}, is {spec.num_chosen}",
        )
    return spec


class Moe:
    """A mixture of experts with the router and the shared expert's gate in one product."""

    def __init__(self, *, spec: MoeSpec, weights: Weights) -> None:
        self._spec = spec
        self._experts = _Experts(spec=spec, weights=weights.at("experts"))
        is_sigmoid = isinstance(spec.routing, SigmoidRouting)
        self._is_gated = isinstance(spec.routing, SoftmaxRouting) and spec.shared_width > 0
        self._router_dtype = torch.float32 if is_sigmoid else None
        names = ["gate"]
        rows = [spec.num_experts]
        if self._is_gated:
            names = [*names, "shared_expert_gate"]
            rows = [*rows, 1]
        self._router = weights.whole().linear(
            *names,
            rows=rows,
            in_features=spec.hidden_size,
            bias=spec.clamped is not None,
            dtype=self._router_dtype,
        )
        if is_sigmoid:
            self._bias = weights.tensor(
                "gate.e_score_correction_bias", spec.num_experts, dtype=torch.float32
            )
        self._shared: Mlp | None = None
        if spec.shared is not None:
            self._shared = Mlp(
                spec=spec.shared,
                weights=weights.at("shared_experts" if is_sigmoid else "shared_expert"),
            )

    @property
    def expert_tokens(self) -> ExpertTokens:
        return self._experts.tokens

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        routing = self._spec.routing
        num_chosen = self._spec.num_chosen
        logits = self._router(x if self._router_dtype is None else x.to(self._router_dtype))
        scores = logits[:, : self._spec.num_experts]
        if isinstance(routing, SigmoidRouting):
            weights, ids = routing.choose(scores, self._bias, num_chosen=num_chosen)
        else:
            weights, ids = routing.choose(scores, num_chosen=num_chosen)
        homes = self._experts.homes(x)
        out = self._experts.forward(x, weights, ids, homes)
        if self._shared is not None:
            shared = self._shared.forward(x)[homes.own].float()
            out += (
                sigmoid(logits[homes.own, self._spec.num_experts :].float()) * shared
                if self._is_gated
                else shared
            )
        return homes.everywhere(out, x.dtype)


class _Experts:
    """The routed experts of a rank, which have equal shapes.

    All ranks know all tokens, and so the tokens of every expert. Each rank runs its own experts,
    and results are sent to the homes of their tokens.
    """

    def __init__(self, *, spec: MoeSpec, weights: Weights) -> None:
        self._rows = weights.adapters.rows
        updated, weights = weights, weights.without_adapters()
        self._num_experts = spec.num_experts
        self._num_chosen = spec.num_chosen
        self._weighs_inputs = isinstance(spec.routing, InputRouting)
        self._own = spec.experts
        self._shares = spec.shares
        self._num_most = max(len(share) for share in spec.shares)  # experts of any rank
        self._ranks = weights.ranks
        self.tokens = ExpertTokens(torch.zeros(spec.num_experts, dtype=torch.int64), spec.experts)
        shape = ExpertShape(self._own, spec.hidden_size, spec.expert_width, spec.swaps_factors)
        self._layers: ExpertLayers = (
            GatedExperts(shape=shape, weights=weights, updated=updated)
            if spec.clamped is None
            else ClampedExperts(
                shape=shape, activation=spec.clamped, weights=weights, updated=updated
            )
        )

    def homes(self, x: Tensor) -> Homes:
        """Return the homes of tokens x [T, hidden].

        All ranks decide by the largest part of the experts, and so alike.
        """
        num_bytes = x.nbytes * self._num_chosen * self._num_most // self._num_experts
        return Homes(self._ranks, len(x), num_bytes)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, homes: Homes) -> Tensor:
        """Return the weighted sums of the tokens at home here, [tokens, hidden] fp32.

        `x` is [T, hidden]; `weights` fp32 and `ids` are [T, chosen]. Weights apply to inputs or to
        outputs.
        """
        by_expert = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self._num_experts).cpu()
        self.tokens.counts.add_(counts)
        gains = weights.flatten()[by_expert, None].to(x.dtype) if self._weighs_inputs else None
        results = self._results(
            x, by_expert // self._num_chosen, gains, counts.tolist(), ids, homes
        ).float()
        weights = weights[homes.own]
        ids = ids[homes.own]
        by_expert = by_expert if homes.counts is None else ids.flatten().argsort(stable=True)
        if not self._weighs_inputs:
            results *= weights.flatten()[by_expert, None]
        # A token's results are ordered by expert. Here they are brought together, in that order.
        own = (by_expert // self._num_chosen).argsort(stable=True).view(ids.shape)
        out = results[own[:, 0]]
        for place in range(1, self._num_chosen):
            out += results[own[:, place]]
        return out

    def _results(
        self,
        x: Tensor,
        tokens: Tensor,
        gains: Tensor | None,
        counts: list[int],
        ids: Tensor,
        homes: Homes,
    ) -> Tensor:
        """Return the experts' results for the tokens at home here.

        They are [tokens * chosen, hidden], ordered by expert. `x` is [T, hidden]. `tokens` is [T *
        chosen]; its first counts[0] entries are for the first expert, and so on. Each input is
        multiplied by its gain, [T * chosen, 1].
        """
        own = counts[self._own.start : self._own.stop]
        mine = slice(start := sum(counts[: self._own.start]), start + sum(own))
        tokens = tokens[mine]
        given = x[tokens] if gains is None else x[tokens] * gains[mine]
        with self._rows.having_only(tokens):
            results = self._layers(given, own)
        if self._ranks is None:
            return results
        if homes.counts is None:
            return self._ranks.gather(
                results, [sum(counts[share.start : share.stop]) for share in self._shares]
            )
        ends = torch.tensor(homes.counts).cumsum(0)
        places = torch.bucketize(tokens, ends, right=True)
        shares = torch.bincount(places, minlength=len(ends)).tolist()
        owners = owners_of(ids[homes.own].flatten(), self._shares)
        coming = torch.bincount(owners, minlength=len(ends)).tolist()
        return self._ranks.swap(torch.split(results[places.argsort(stable=True)], shares), coming)
