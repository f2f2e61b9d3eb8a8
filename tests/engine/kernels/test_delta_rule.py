"""The host's delta rule and convolution: their definitions in double precision, and bits of their
own tokens alone."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.recurrent.causal_conv import causal_conv
from engine.kernels.host.recurrent.delta_rule import DeltaInputs, delta_chunks, delta_steps
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps

TEAM = Team()
Shape = tuple[int, int, int, int, int]  # Hk, Hv, dk, dv, and of how many decays each head has one
SHAPES = [
    (1, 1, 8, 8, 1),
    (2, 6, 24, 100, 1),
    (3, 3, 5, 17, 5),
    (1, 2, 128, 128, 1),
    (1, 2, 128, 128, 128),
]
TYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def delta_inputs(count: int, shape: Shape, dtype: torch.dtype, *, seed: int = 1) -> DeltaInputs:
    """Return slices of wider tokens, as a projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    k_heads, v_heads, key_dim, value_dim, num_decays = shape
    widths = [k_heads * key_dim, k_heads * key_dim, v_heads * value_dim]
    wide = torch.randn(count, sum(widths) + 3, generator=generator).to(dtype)
    q, k, v = torch.split(wide[:, 3:], widths, 1)
    q, k = q.view(count, k_heads, key_dim), k.view(count, k_heads, key_dim)
    v = v.view(count, v_heads, value_dim)
    beta = torch.rand(count, v_heads, generator=generator)
    g = torch.rand(count, v_heads, num_decays, generator=generator)
    # A channel's decays may leave nothing of a key within two tokens, while another keeps it.
    g = -g[..., 0].contiguous() if num_decays == 1 else -g * torch.logspace(-1, 2, num_decays)
    return DeltaInputs(q, k, v, g, beta)


def part_of(inputs: DeltaInputs, tokens: list[int] | slice) -> DeltaInputs:
    return DeltaInputs(
        inputs.q[tokens],
        inputs.k[tokens],
        inputs.v[tokens],
        inputs.g[tokens].contiguous(),
        inputs.beta[tokens].contiguous(),
    )


def joined(parts: list[DeltaInputs]) -> DeltaInputs:
    return DeltaInputs(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("q", "k", "v", "g", "beta")
        )
    )


def rows_of(counts: list[int], slots: list[int], is_new: list[int]) -> RecurrentRows:
    return RecurrentRows(
        torch.tensor([0, *counts]).cumsum(0), torch.tensor(slots), torch.tensor(is_new)
    )


def states(shape: Shape, num_slots: int = 4) -> Tensor:
    return torch.full((num_slots, *shape[1:4]), math.nan)


def definition(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state, in fp64."""
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    share, key_dim = v.shape[1] // q.shape[1], q.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = q.repeat_interleave(share, 1) * key_dim**-0.5, k.repeat_interleave(share, 1)
    state, out = torch.zeros(*v.shape[1:2], key_dim, v.shape[2], dtype=torch.float64), []
    for token in range(len(v)):
        state = state * inputs.g[token].double().exp().view(len(state), -1, 1)
        error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
        state = (
            state + k[token][:, :, None] * (inputs.beta[token].double()[:, None] * error)[:, None]
        )
        out.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(out), state


def stepped(inputs: DeltaInputs, pool: Tensor, slot: int, *, is_new: bool) -> Tensor:
    """Run token by token."""
    outs = []
    for token in range(len(inputs.v)):
        rows = rows_of([1], [slot], [int(is_new and token == 0)])
        steps = StateSteps(torch.tensor([-1]), torch.tensor([slot]))
        outs.append(
            delta_steps(part_of(inputs, slice(token, token + 1)), rows, steps, pool, pool, TEAM)
        )
    return torch.cat(outs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 150])
def test_both_forms_are_the_definition(shape: Shape, dtype: torch.dtype, count: int) -> None:
    inputs = delta_inputs(count, shape, dtype)
    expected, last = definition(inputs)
    pool = states(shape)
    found = delta_chunks(inputs, rows_of([count], [2], [1]), pool, TEAM)
    one_by_one = states(shape)
    for out, state in (
        (found, pool[2]),
        (stepped(inputs, one_by_one, 2, is_new=True), one_by_one[2]),
    ):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=4e-6)
    assert pool[[0, 1, 3]].isnan().all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    threads=st.integers(1, 4),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(TYPES),
    cut=st.integers(0, 2),
)
def test_chunks_have_the_bits_they_have_alone(
    counts: list[int], threads: int, shape: Shape, dtype: torch.dtype, cut: int
) -> None:
    """Rows in company, on any number of threads, cut at a multiple of 64."""
    torch.set_num_threads(threads)
    inputs = [delta_inputs(count, shape, dtype, seed=row) for row, count in enumerate(counts)]
    together, slots = states(shape), list(range(len(counts)))
    firsts = [min(64 * cut, count) for count in counts]
    out = delta_chunks(
        joined([part_of(x, slice(0, n)) for x, n in zip(inputs, firsts, strict=True)]),
        rows_of(firsts, slots, [1] * len(counts)),
        together,
        TEAM,
    )
    rests = [count - first for count, first in zip(counts, firsts, strict=True)]
    rest = delta_chunks(
        joined([part_of(x, slice(n, None)) for x, n in zip(inputs, firsts, strict=True)]),
        rows_of(rests, slots, [int(first == 0) for first in firsts]),
        together,
        TEAM,
    )
    torch.set_num_threads(1)
    for row, parts in enumerate(
        zip(torch.split(out, firsts), torch.split(rest, rests), strict=True)
    ):
        alone = states(shape)
        if counts[row]:
            expected = delta_chunks(inputs[row], rows_of([counts[row]], [row], [1]), alone, TEAM)
            assert torch.equal(torch.cat(parts), expected)
            assert torch.equal(together[row], alone[row])


@pytest.mark.parametrize("count", [1, 3, 4, 17, 63, 65])
@pytest.mark.parametrize("num_decays", [1, 24])
def test_later_tokens_change_no_bit_of_earlier_ones(count: int, num_decays: int) -> None:
    shape: Shape = (2, 4, 24, 40, num_decays)
    whole = delta_inputs(130, shape, torch.float32)
    poisoned = joined([part_of(whole, slice(0, count)), delta_inputs(1, shape, torch.float32)])
    poisoned.v[count] = math.nan
    outs = []
    for inputs in (whole, poisoned, part_of(whole, slice(0, count))):
        outs.append(
            delta_chunks(inputs, rows_of([len(inputs.v)], [0], [1]), states(shape), TEAM)[:count]
        )
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_tree_node_has_the_bits_of_its_path_decoded(threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    shape: Shape = (2, 6, 24, 100, 24 if threads % 2 else 1)
    parents = [-1, 0, 0, 1, -1, 4, 2]
    inputs, prompt, other = (delta_inputs(n, shape, dtype, seed=n) for n in (7, 70, 3))
    pool = states(shape)
    delta_chunks(prompt, rows_of([70], [1], [1]), pool, TEAM)
    scratch, before = states(shape, 20), pool.clone()
    steps = StateSteps(
        torch.tensor([-1, 0, 1, *(p + 3 if p >= 0 else -1 for p in parents)]),
        torch.tensor([0, 1, 2, *range(8, 15)]),
    )
    out = delta_steps(
        joined([other, inputs]), rows_of([3, 7], [3, 1], [1, 0]), steps, pool, scratch, TEAM
    )
    assert torch.equal(pool[1], before[1])
    torch.set_num_threads(1)
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        plain = before.clone()
        expected = stepped(part_of(inputs, path), plain, 1, is_new=False)
        assert torch.equal(out[3 + node], expected[-1])
        assert torch.equal(scratch[8 + node], plain[1])
    assert torch.equal(out[:3], stepped(other, states(shape), 3, is_new=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("channels", "kernel"), [(1, 2), (24, 4), (300, 4), (520, 3)])
def test_convolution_equals_the_definition_for_any_chunks(
    dtype: torch.dtype, channels: int, kernel: int
) -> None:
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(40, channels + 5, generator=generator).to(dtype)[:, 5:]
    taps = torch.randn(kernel, channels, generator=generator)
    padded = torch.cat([torch.zeros(kernel - 1, channels, dtype=torch.float64), x.double()])
    total = sum(padded[tap : tap + 40] * taps[tap] for tap in range(kernel))
    assert isinstance(total, Tensor)
    expected = total * total.sigmoid()
    outs = []
    for cuts, threads in (([40], 1), ([1] * 40, 2), ([2, 0, 30, 1, 7], 3)):
        torch.set_num_threads(threads)
        pool, start, parts = torch.full((3, kernel - 1, channels), math.nan, dtype=dtype), 0, []
        for count in cuts:
            rows = rows_of([count], [1], [int(start == 0)])
            parts.append(causal_conv(x[start : start + count], taps, pool, rows, TEAM))
            start += count
        outs.append(torch.cat(parts))
        assert torch.equal(pool[1], x[-(kernel - 1) :])
        assert pool[[0, 2]].isnan().all()
    spacing = torch.finfo(dtype).eps
    torch.testing.assert_close(outs[0].double(), expected, rtol=2 * spacing, atol=4e-6)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
