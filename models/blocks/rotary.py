"""Rotary position embedding: its parameters, the frequencies per scaling type, and the rotation.

The stage's first layer computes cos and sin once per forward (`Rotary.table`), and every attention
layer applies this table.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from engine.core.numerics import HOST
from engine.kernels.host.codegen.compiled import Team, dense_tokens, has_kernels
from engine.kernels.host.tokens.norm_rope import rotary_table, rotate_halves
from models.blocks.config import RawConfig

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclass(frozen=True)
class RopeSpec:
    """One scaling of rotary frequencies.

    `dim` is the number of rotated dimensions of a head. `original_context` is the context length of
    the model's first training. Fields that the kind does not use keep their defaults.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    amplitude: float = 1.0  # yarn: factor on cos and sin
    score_gain: float = 1.0  # yarn: factor on attention scores, for the families that apply it
    num_turning: int = 0  # proportional: the number of pairs that rotate


def read_rope(
    raw: RawConfig,
    *,
    head_dim: int,
    default_partial: float | None = None,
    default_theta: float = 10000.0,
) -> RopeSpec:
    """Read the rotary parameters of a config.

    The newer style is `rope_parameters`. The older one is `rope_theta` with `rope_scaling`, which
    has its kind under `rope_type` or `type`.

    `default_partial` is the share of a head that rotates if the config names none. With None, whole
    heads rotate in this family, whatever `partial_rotary_factor` is, as in transformers.

    Raises:
        ConfigError: the kind is not default, linear, llama3, yarn or proportional; a parameter is
            missing or impossible; a family with whole heads has a share in a kind that transformers
            cannot run with it; or both styles are given and differ. transformers then uses the
            older one, which is probably not the intended one.
    """
    read = partial(
        _read_rope,
        raw,
        head_dim=head_dim,
        default_partial=default_partial,
        default_theta=default_theta,
    )
    if "rope_parameters" not in raw:
        return read("rope_scaling")
    newer = read("rope_parameters")
    if "rope_scaling" in raw and (older := read("rope_scaling")) != newer:
        raise raw.fail(
            "rope_scaling",
            f"differs from rope_parameters ({older}, not {newer}): keep one of them",
        )
    return newer


def _read_rope(
    raw: RawConfig, name: str, *, head_dim: int, default_partial: float | None, default_theta: float
) -> RopeSpec:
    """Read the section `name`. Without it, rope is plain."""
    params = raw.section(name) if name in raw else RawConfig({})
    kind = params.text("rope_type" if "rope_type" in params else "type", "default")
    theta = params.number("rope_theta", raw.number("rope_theta", default_theta))
    share = params.number(
        "partial_rotary_factor", raw.number("partial_rotary_factor", default_partial or 1.0)
    )
    if default_partial is None and kind != "proportional" and share != 1:
        if kind != "default":
            raise raw.fail(
                "partial_rotary_factor",
                f"{share} is not supported: this family rotates whole heads",
            )
        share = 1.0
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise raw.fail(
            "partial_rotary_factor",
            f"{share} of head_dim {head_dim} gives {dim} rotated dimensions",
        )
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    if kind == "proportional":
        return RopeSpec(
            dim=head_dim,
            theta=theta,
            kind="proportional",
            factor=params.number("factor", 1.0),
            num_turning=dim // 2,
        )
    if kind == "linear":
        return RopeSpec(dim=dim, theta=theta, kind="linear", factor=params.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise raw.fail(
            name,
            f"type {kind!r} is not supported, only default, linear, llama3, yarn, proportional",
        )
    return _read_extended(raw, params, kind, dim=dim, theta=theta)


def _read_extended(
    raw: RawConfig, params: RawConfig, kind: str, *, dim: int, theta: float
) -> RopeSpec:
    """Read the section of a rope that extends the context of the original model."""
    context_field = "original_max_position_embeddings"
    original = params.integer(
        context_field, raw.integer(context_field, raw.integer("max_position_embeddings"))
    )
    if kind == "llama3":
        return RopeSpec(
            dim=dim,
            theta=theta,
            kind="llama3",
            factor=params.number("factor"),
            original_context=original,
            low_freq_factor=params.number("low_freq_factor"),
            high_freq_factor=params.number("high_freq_factor"),
        )
    factor = params.number("factor", raw.integer("max_position_embeddings") / original)
    return RopeSpec(
        dim=dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        truncate=params.flag("truncate", default=True),
        amplitude=_yarn_amplitude(params, factor),
        score_gain=_yarn_score_gain(params, factor),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's growth of attention logits by context factor (Peng et al. 2023, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_amplitude(params: RawConfig, factor: float) -> float:
    if "attention_factor" in params:
        return params.number("attention_factor")
    if "mscale" in params and "mscale_all_dim" in params:
        mscale = params.number("mscale")
        all_dim = params.number("mscale_all_dim")
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _yarn_score_gain(params: RawConfig, factor: float) -> float:
    return (
        yarn_mscale(factor, params.number("mscale_all_dim")) ** 2
        if "mscale_all_dim" in params
        else 1.0
    )


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Return the radians per position for each rotated pair, [dim / 2] fp32."""
    plain = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "proportional":
        return torch.where(torch.arange(len(plain)) < spec.num_turning, plain / spec.factor, 0.0)
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Slow long waves down by `factor`, keep short ones, and mix smoothly in between."""
    turns = spec.original_context * plain / (2 * math.pi)  # within the original context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / spec.factor


def _yarn(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Keep pairs that rotate often within the original context and slow rare ones down.

    The ramp in between is linear.
    """

    def pair_of(turns: float) -> float:
        return (
            spec.dim
            * math.log(spec.original_context / (turns * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low = pair_of(spec.beta_fast)
    high = pair_of(spec.beta_slow)
    if spec.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, spec.dim - 1)
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (
        high - low if high != low else 1e-3
    )
    slow = ramp.clamp(0, 1)
    return plain * (1 - slow) + plain / spec.factor * slow


@dataclass(frozen=True)
class RotaryTable:
    """The cos and sin of one batch's positions, [T, 1, dim / 2] in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def rotate_halves(self, x: Tensor) -> Tensor:
        """Rotate pairs (i, i + dim/2) of the first dimensions of x [T, heads, head_dim].

        The other dimensions are unchanged.
        """
        if x.device.type == "cpu" and has_kernels(x.dtype) and x.dtype == self.cos.dtype:
            return rotate_halves(
                dense_tokens(x), self.cos.contiguous(), self.sin.contiguous(), Team()
            )
        half = self.cos.shape[-1]
        return self._rotate(x, x[..., :half], x[..., half : 2 * half])

    def rotate_pairs(self, x: Tensor) -> Tensor:
        """Rotate pairs (2i, 2i + 1) of the first dimensions of x [T, heads, head_dim].

        The result is in halves layout. Dot products do not change if queries and keys use the same
        layout.
        """
        dim = 2 * self.cos.shape[-1]
        return self._rotate(x, x[..., 0:dim:2], x[..., 1:dim:2])

    def _rotate(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return [a cos - b sin, b cos + a sin, the rest of x], written once."""
        half = self.cos.shape[-1]
        out = x.new_empty(x.shape)
        torch.mul(a, self.cos, out=out[..., :half]).addcmul_(b, self.sin, value=-1)
        torch.mul(b, self.cos, out=out[..., half : 2 * half]).addcmul_(a, self.sin)
        out[..., 2 * half :] = x[..., 2 * half :]
        return out


class Rotary:
    """The source of a batch's table. It is stateless, so that no table can outlive its batch."""

    def __init__(self, *, spec: RopeSpec, dtype: torch.dtype, device: torch.device = HOST) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)
        self._amplitude = spec.amplitude
        self._dtype = dtype

    @classmethod
    def of(
        cls, spec: RopeSpec | None, *, dtype: torch.dtype, device: torch.device
    ) -> "Rotary | None":
        """Return the rotary embedding, or None for layers without positions."""
        return None if spec is None else cls(spec=spec, dtype=dtype, device=device)

    def table(self, positions: Tensor) -> RotaryTable:
        """Return the table of absolute positions [T] int64, on the host or on the device.

        Angles are rounded to fp32, and their cosines and sines to the nearest fp32 numbers. So
        every library gives the same bits.
        """
        if self._frequencies.device.type == "cpu" and has_kernels(self._dtype):
            return RotaryTable(
                *rotary_table(positions, self._frequencies, self._amplitude, self._dtype, Team())
            )
        angles = (positions.to(self._frequencies.device)[:, None].float() * self._frequencies)[
            :, None
        ].double()
        return RotaryTable(
            cos=(angles.cos().float() * self._amplitude).to(self._dtype),
            sin=(angles.sin().float() * self._amplitude).to(self._dtype),
        )
