"""Recurrent layers against token-by-token fp64, and their bits under any cut and company."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.cpu.recurrent import CpuRecurrent
from engine.backends.gated_delta import chunked
from engine.contracts.recurrent import NoStates, RecurrentBackend
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import Numerics
from runtime.errors import InternalError
from tests.support.kernels.batches import Row, make_batch
from tests.support.kernels.recurrent import (
    CHANNELS,
    K_DIM,
    K_HEADS,
    KERNEL,
    LAYER,
    NUM_SLOTS,
    V_DIM,
    V_HEADS,
    WEIGHT,
    Tokens,
    convolution,
    delta_rule,
    feed,
)

QUICK = settings(max_examples=20, deadline=None, derandomize=True)


def backend(
    *, junk: float = float("nan"), dtype: torch.dtype = torch.float32
) -> tuple[CpuRecurrent, Tensor, Tensor]:
    conv = torch.full((NUM_SLOTS, KERNEL - 1, CHANNELS), junk, dtype=dtype)
    state = torch.full((NUM_SLOTS, V_HEADS, K_DIM, V_DIM), junk)
    made = CpuRecurrent(
        conv_pools={LAYER: conv}, state_pools={LAYER: state}, numerics=Numerics.EXACT
    )
    return made, conv, state


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # with a kernel, without one
@pytest.mark.parametrize("by_channel", [False, True])
def test_prefill_then_decode_follows_the_definition(
    num_tokens: int, dtype: torch.dtype, *, by_channel: bool
) -> None:
    recurrent, conv, state = backend(dtype=dtype)
    tokens = Tokens(num_tokens + 5, seed=num_tokens, slot=3, by_channel=by_channel, dtype=dtype)
    feed(recurrent, ForwardMode.PREFILL, (tokens, num_tokens))
    for _ in range(5):
        feed(recurrent, ForwardMode.DECODE, (tokens, 1))
    out, last = delta_rule(tokens, num_tokens + 5)
    torch.testing.assert_close(torch.cat(tokens.out).double(), out, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(state[3].double(), last, rtol=1e-4, atol=2e-6)
    expected = convolution(tokens, num_tokens + 5)
    rounding = 1e-4 if dtype is torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(torch.cat(tokens.conv).double(), expected, rtol=rounding, atol=2e-6)
    assert torch.equal(conv[3], tokens.x[-(KERNEL - 1) :])


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_conv_state_of_a_prompt_shorter_than_the_kernel_starts_with_zeros(num_tokens: int) -> None:
    recurrent, conv, _ = backend()
    tokens = Tokens(num_tokens, seed=1, slot=1)
    feed(recurrent, ForwardMode.PREFILL, (tokens, num_tokens))
    assert (conv[1, : KERNEL - 1 - num_tokens] == 0).all()
    assert torch.equal(conv[1, KERNEL - 1 - num_tokens :], tokens.x)


def test_decode_may_start_a_request() -> None:
    recurrent, _, _ = backend()
    tokens = Tokens(3, seed=4, slot=1)
    for _ in range(3):
        feed(recurrent, ForwardMode.DECODE, (tokens, 1))
    torch.testing.assert_close(
        torch.cat(tokens.out).double(), delta_rule(tokens, 3)[0], rtol=1e-4, atol=2e-6
    )
    torch.testing.assert_close(
        torch.cat(tokens.conv).double(), convolution(tokens, 3), rtol=1e-4, atol=2e-6
    )


def run_alone(num_tokens: int, steps: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the whole prompt at once, then single steps: the reference bits."""
    recurrent, conv, state = backend()
    tokens = Tokens(num_tokens + steps, seed=seed, slot=1)
    feed(recurrent, ForwardMode.PREFILL, (tokens, num_tokens))
    for _ in range(steps):
        feed(recurrent, ForwardMode.DECODE, (tokens, 1))
    return torch.cat(tokens.out), torch.cat(tokens.conv), state[1], conv[1]


@QUICK
@given(
    num_tokens=st.integers(1, 330),
    cuts=st.sets(st.integers(1, 5), max_size=4),
    steps=st.integers(0, 3),
    others=st.lists(st.integers(1, 140), max_size=4),
    place=st.integers(0, 4),
)
def test_any_cut_on_the_grid_in_any_company(
    num_tokens: int, cuts: set[int], steps: int, others: list[int], place: int
) -> None:
    edges = [0, *(64 * cut for cut in sorted(cuts) if 64 * cut < num_tokens), num_tokens]
    recurrent, conv, state = backend()
    tokens = Tokens(num_tokens + steps, seed=7, slot=5)
    company = [Tokens(n + steps, seed=20 + i, slot=(6, 1, 7, 2)[i]) for i, n in enumerate(others)]
    for index, (start, end) in enumerate(itertools.pairwise(edges)):
        parts = list(zip(company, others, strict=True)) if index == 0 else []
        parts.insert(place, (tokens, end - start))
        feed(recurrent, ForwardMode.PREFILL, *parts)
    for _ in range(steps):
        parts = [(other, 1) for other in company]
        parts.insert(place, (tokens, 1))
        feed(recurrent, ForwardMode.DECODE, *parts)
    got = (torch.cat(tokens.out), torch.cat(tokens.conv), state[5], conv[5])
    assert all(
        torch.equal(a, b) for a, b in zip(got, run_alone(num_tokens, steps, seed=7), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_channel", [False, True])
def test_replayed_tokens_have_the_bits_of_decoding_them(
    dtype: torch.dtype, *, by_channel: bool
) -> None:
    """Rows of several tokens and of one, which leave their states in the slots."""
    results = []
    for is_replayed in (False, True):
        recurrent, conv, state = backend(dtype=dtype)
        rows = [
            Tokens(80, seed=slot, slot=slot, by_channel=by_channel, dtype=dtype)
            for slot in (5, 2, 6)
        ]
        feed(recurrent, ForwardMode.PREFILL, *((tokens, 64) for tokens in rows))
        for counts in ((7, 1, 3), (1, 1, 1), (2, 9, 5)):
            if is_replayed:
                parts = zip(rows, counts, strict=True)
                feed(recurrent, ForwardMode.REPLAY, *parts)
                continue
            for step in range(max(counts)):
                parts = zip(rows, counts, strict=True)
                feed(
                    recurrent,
                    ForwardMode.DECODE,
                    *((tokens, 1) for tokens, count in parts if count > step),
                )
        out = [part for tokens in rows for part in (torch.cat(tokens.out), torch.cat(tokens.conv))]
        results.append([*out, conv[[5, 2, 6]], state[[5, 2, 6]]])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_replay_may_start_a_request() -> None:
    recurrent, _, _ = backend()
    tokens = Tokens(3, seed=4, slot=1)
    feed(recurrent, ForwardMode.REPLAY, (tokens, 3))
    torch.testing.assert_close(
        torch.cat(tokens.out).double(), delta_rule(tokens, 3)[0], rtol=1e-4, atol=2e-6
    )


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("mode", [ForwardMode.PREFILL, ForwardMode.DECODE])
def test_a_starting_row_ignores_earlier_contents_of_its_slot(
    junk: float, mode: ForwardMode
) -> None:
    results = []
    for content in (junk, 0.0):
        recurrent, _, _ = backend(junk=content)
        started, starting = Tokens(65, seed=1, slot=2), Tokens(2, seed=2, slot=4)
        feed(recurrent, ForwardMode.PREFILL, (started, 64))
        feed(recurrent, mode, (started, 1), (starting, 1))
        feed(recurrent, ForwardMode.DECODE, (starting, 1))
        results.append(torch.cat(started.out + started.conv[:0] + starting.out))
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", [ForwardMode.PREFILL, ForwardMode.DECODE])
def test_a_forward_changes_its_own_slots_only(mode: ForwardMode) -> None:
    recurrent, conv, state = backend(junk=7.0)
    feed(recurrent, mode, (Tokens(1, seed=1, slot=4), 1), (Tokens(1, seed=2, slot=6), 1))
    others = [0, 1, 2, 3, 5, 7]
    assert (conv[others] == 7.0).all()
    assert (state[others] == 7.0).all()
    assert (state[[4, 6]] != 7.0).all()
    assert (conv[[4, 6], -1] != 7.0).all()


def test_rows_of_a_prefill_without_tokens_keep_their_state() -> None:
    recurrent, conv, state = backend()
    tokens, other = Tokens(65, seed=1, slot=2), Tokens(30, seed=3, slot=3)
    feed(recurrent, ForwardMode.PREFILL, (tokens, 64))
    before = conv[2].clone(), state[2].clone()
    feed(recurrent, ForwardMode.PREFILL, (tokens, 0), (other, 30))
    assert torch.equal(conv[2], before[0])
    assert torch.equal(state[2], before[1])
    torch.testing.assert_close(
        torch.cat(other.out).double(), delta_rule(other, 30)[0], rtol=1e-4, atol=2e-6
    )


def test_bf16_channels_are_summed_in_fp32() -> None:
    pool = torch.zeros(2, KERNEL - 1, CHANNELS, dtype=torch.bfloat16)
    recurrent = CpuRecurrent(conv_pools={LAYER: pool}, state_pools={}, numerics=Numerics.EXACT)
    tokens = Tokens(40, seed=5, slot=1)
    tokens.x = tokens.x.bfloat16()
    out = recurrent.causal_conv(
        LAYER, tokens.x, WEIGHT.bfloat16(), make_batch(ForwardMode.PREFILL, [Row(40, slot=1)])
    )
    padded = torch.cat([torch.zeros(KERNEL - 1, CHANNELS), tokens.x.float()])
    total = sum(padded[tap : tap + 40] * WEIGHT.bfloat16().float()[:, tap] for tap in range(KERNEL))
    assert isinstance(total, Tensor)
    assert torch.equal(out, torch.nn.functional.silu(total).bfloat16())


def test_the_chunked_form_changes_none_of_its_inputs() -> None:
    shapes = {
        "q": (2, 3, 64, 4),
        "k": (2, 3, 64, 4),
        "v": (2, 3, 64, 5),
        "g": (2, 3, 64, 1),
        "beta": (2, 3, 64),
        "state": (1, 3, 4, 5),
    }
    inputs = {name: torch.rand(shape) for name, shape in shapes.items()}
    before = {name: x.clone() for name, x in inputs.items()}
    chunked(**inputs, chunk_counts=[2])
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


def idle() -> ForwardBatch:
    return make_batch(ForwardMode.IDLE, [])


def test_nothing_to_do() -> None:
    recurrent, _, _ = backend()
    empty = torch.empty(0, V_HEADS)
    assert recurrent.causal_conv(LAYER, torch.empty(0, CHANNELS), WEIGHT, idle()).shape == (
        0,
        CHANNELS,
    )
    out = recurrent.gated_delta_rule(
        LAYER,
        torch.empty(0, K_HEADS, K_DIM),
        torch.empty(0, K_HEADS, K_DIM),
        torch.empty(0, V_HEADS, V_DIM),
        empty,
        empty,
        idle(),
    )
    assert out.shape == (0, V_HEADS, V_DIM)


def test_a_chunk_that_starts_off_the_grid_is_refused() -> None:
    recurrent, _, _ = backend()
    tokens = Tokens(80, seed=1, slot=1)
    feed(recurrent, ForwardMode.PREFILL, (tokens, 50))
    with pytest.raises(InternalError, match="starts at 50"):
        feed(recurrent, ForwardMode.PREFILL, (tokens, 30))


@pytest.mark.parametrize(
    ("mode", "count", "match"),
    [
        (ForwardMode.DECODE, 2, "one token"),
        (ForwardMode.VERIFY, 1, "verify"),
        (ForwardMode.DRAFT, 1, "draft"),
    ],
)
def test_unsupported_recurrent_features_are_refused(
    mode: ForwardMode, count: int, match: str
) -> None:
    recurrent, _, _ = backend()
    with pytest.raises(InternalError, match=match):
        feed(recurrent, mode, (Tokens(2, seed=1, slot=1), count))


@pytest.mark.parametrize("recurrent", [backend()[0], NoStates()], ids=["cpu", "no-states"])
def test_a_layer_of_another_stage_is_refused(recurrent: RecurrentBackend) -> None:
    batch = make_batch(ForwardMode.DECODE, [Row(1)])
    with pytest.raises(InternalError, match="layer 9 has no conv"):
        recurrent.causal_conv(9, torch.zeros(1, CHANNELS), WEIGHT, batch)
    zeros = torch.zeros(1, V_HEADS)
    with pytest.raises(InternalError, match="layer 9 has no state"):
        recurrent.gated_delta_rule(
            9,
            torch.zeros(1, K_HEADS, K_DIM),
            torch.zeros(1, K_HEADS, K_DIM),
            torch.zeros(1, V_HEADS, V_DIM),
            zeros,
            zeros,
            batch,
        )


def test_state_pools_must_be_fp32() -> None:
    with pytest.raises(InternalError, match="fp32"):
        CpuRecurrent(
            conv_pools={},
            state_pools={0: torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)},
            numerics=Numerics.EXACT,
        )
