"""The sampler against distributions worked out by hand, naive Python, and counting."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.batch import OutputOpening, OutputRow, SamplingRow
from engine.core.request import SampledToken, SamplingParams
from engine.sampling.sampler import adjusted, largest, sample
from engine.sampling.uniform import uniform
from runtime.errors import InternalError
from tests.support.kernels.numpy_sampling import filtered

MASK = 2**64 - 1
History = tuple[tuple[int, ...], tuple[int, ...]]


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Compute Philox 4x64-10 of the paper, on Python integers."""
    (k0, k1), (x0, x1, x2, x3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * x0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * x2, 2**64)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return x0, x1, x2, x3


def test_the_oracle_passes_the_known_answer_of_the_paper() -> None:
    assert philox((0, 0), (0, 0, 0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, MASK])
@pytest.mark.parametrize("position", [0, 1, 4095, 10**6])
def test_uniform_is_philox_of_seed_and_position(seed: int, position: int) -> None:
    word = philox((seed, 0), (position + 1, 0, 0, 0))[0]
    assert uniform(seed, position) == (word >> 11) / 2**53
    assert 0 <= uniform(seed, position) < 1


def test_uniform_numbers_differ_by_seed_and_position_and_fill_the_interval() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    counts = Counter(int(number * 10) for number in numbers)
    assert (
        sum((counts[i] - 250) ** 2 / 250 for i in range(10)) < 27.9
    )  # chi square, 9 degrees, 0.1 %


def row(position: int = 0, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position=position)  # type: ignore[arg-type]


def all_of(prompt: tuple[int, ...], output: tuple[int, ...]) -> OutputRow:
    """Return a row that carries its whole output."""
    return OutputRow(0, 0, output, OutputOpening(prompt), is_only=True)


def draw_one(logits: Sequence[float], sampling_row: SamplingRow) -> SampledToken:
    return sample(torch.tensor([logits], dtype=torch.float32), [sampling_row])[0]


def share_of(logits: Sequence[float], **params: object) -> dict[int, float]:
    """Return the distribution after the filters, by token id."""
    ids, weights = filtered(np.array(logits, dtype=np.float64), SamplingParams(**params))  # type: ignore[arg-type]
    return {int(i): float(w / weights.sum()) for i, w in zip(ids, weights, strict=True)}


LN = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]  # ids by probability: 1, 3, 2, 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"temperature": 0.5}, {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}),
        ({"temperature": 1e15}, {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_k": 3}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"top_k": 4}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"top_p": 0.01}, {1: 1.0}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.41}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.69}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.71}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"top_p": 0.95}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"min_p": 0.24}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"min_p": 0.26}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"min_p": 0.76}, {1: 1.0}),
        ({"min_p": 1.0}, {1: 1.0}),
        # Top-p takes its share of what top-k left: 4/7 of the two is less than 0.6, so both stay;
        # of all four one.
        ({"top_k": 2, "top_p": 0.56}, {1: 1.0}),
        ({"top_k": 2, "top_p": 0.58}, {1: 4 / 7, 3: 3 / 7}),
        # Temperature comes first: squared shares are 16, 9, 4, 1 of 30.
        ({"temperature": 0.5, "top_p": 0.54}, {1: 16 / 25, 3: 9 / 25}),
        ({"temperature": 0.5, "min_p": 0.3}, {1: 16 / 25, 3: 9 / 25}),
        ({"top_k": 3, "min_p": 0.6}, {1: 4 / 7, 3: 3 / 7}),
    ],
)
def test_filters_leave_the_distribution_worked_out_by_hand(
    params: dict[str, object], expected: dict[int, float]
) -> None:
    assert share_of(LN, **params) == pytest.approx(expected, rel=1e-12)


def test_equal_weights_are_kept_by_lower_id() -> None:
    assert set(share_of([0.0, 1.0, 1.0, 1.0], top_k=2)) == {1, 2}
    assert set(share_of([0.0] * 10, top_p=0.25)) == {0, 1, 2}
    assert set(share_of([0.0] * 10, top_k=4, top_p=0.5)) == {0, 1}


def test_a_large_nucleus_is_found_as_in_a_small_vocabulary() -> None:
    """20,000 weights, of which the larger half holds 2/3 of the mass."""
    logits = np.where(np.arange(20_000) % 2 == 0, math.log(2.0), 0.0)
    ids, _ = filtered(logits, SamplingParams(top_p=0.5))
    assert ids.tolist() == list(range(0, 15_000, 2))
    ids, _ = filtered(logits, SamplingParams(top_p=1 - 1e-12))
    assert len(ids) == 20_000
    ids, _ = filtered(logits, SamplingParams(top_p=0.1))
    assert ids.tolist() == list(range(0, 3_000, 2))


def naive_filtered(logits: list[float], params: SamplingParams) -> list[int]:
    """Apply the same rule with sorted lists and exact sums."""
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    ids = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    total, kept = math.fsum(weights[i] for i in ids), []
    for i in ids:
        kept.append(i)
        if math.fsum(weights[j] for j in kept) >= params.top_p * total:
            break
    return sorted(i for i in kept if weights[i] >= params.min_p)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=1, max_size=30),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.33, 0.77, 0.951]),
    st.sampled_from([0.0, 0.013, 0.37]),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_filters_equal_naive_sorting(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert filtered(np.array(logits), params)[0].tolist() == naive_filtered(logits, params)


def test_a_tiny_temperature_is_greedy_and_warns_of_nothing() -> None:
    assert share_of([1.0, 2.0, 1.999], temperature=1e-310) == {0: 0.0, 1: 1.0, 2: 0.0}


def naive_adjusted(
    logits: list[float], params: SamplingParams, history: History | None, banned: list[int]
) -> list[float]:
    """Apply penalties, bias and bans token by token."""
    prompt, output = history or ((), ())
    result = []
    for token_id, logit in enumerate(logits):
        value = logit
        if token_id in prompt or token_id in output:
            value = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        value -= params.frequency_penalty * output.count(token_id)
        value -= params.presence_penalty if token_id in output else 0.0
        value += dict(params.logit_bias).get(token_id, 0.0)
        result.append(-math.inf if token_id in banned else value)
    return result


TOKENS = st.lists(st.integers(0, 9), max_size=12).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=10, max_size=10),
    TOKENS,
    TOKENS,
    st.sampled_from([1.0, 1.3, 0.5, 10.0]),
    st.sampled_from([0.0, 0.7, -2.0]),
    st.sampled_from([0.0, 1.1, -0.4]),
    st.dictionaries(st.integers(0, 9), st.floats(-100, 100, width=32), max_size=4),
    st.sets(st.integers(0, 9), max_size=3),
)
def test_penalties_equal_naive_counting(
    logits: list[float],
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    banned: set[int],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=tuple(bias.items()),
    )
    history = (tuple(prompt), tuple(output)) if params.needs_history else None
    sampling_row = SamplingRow(
        params,
        position=0,
        output=None if history is None else all_of(*history),
        banned_token_ids=tuple(banned),
    )
    before = np.array(logits)
    result = adjusted(before, sampling_row).tolist()
    assert result == pytest.approx(
        naive_adjusted(logits, params, history, list(banned)), rel=1e-12, abs=1e-12
    )
    assert before.tolist() == logits


def test_history_is_ignored_without_penalties() -> None:
    sampling_row = SamplingRow(SamplingParams(), position=0, output=all_of((0,), (1,)))
    assert adjusted(np.array([1.0, 2.0]), sampling_row).tolist() == [1.0, 2.0]


def test_greedy_follows_penalties_bias_and_bans() -> None:
    logits = [1.0, 3.0, 2.5, -1.0]
    greedy = SamplingParams(temperature=0)
    assert draw_one(logits, SamplingRow(greedy, 0)).token_id == 1
    assert draw_one(logits, SamplingRow(greedy, 0, banned_token_ids=(1,))).token_id == 2
    assert draw_one(logits, row(temperature=0, logit_bias=((3, 4.5),))).token_id == 3
    for params in (
        SamplingParams(temperature=0, presence_penalty=0.6),
        SamplingParams(temperature=0, frequency_penalty=0.3),
        SamplingParams(temperature=0, repetition_penalty=1.3),
    ):
        assert draw_one(logits, SamplingRow(params, 0, output=all_of(*((), (1, 1))))).token_id == 2
        assert draw_one(logits, SamplingRow(params, 0, output=all_of(*((), (3, 0))))).token_id == 1
    prompt_only = SamplingParams(temperature=0, repetition_penalty=1.3)
    assert draw_one(logits, SamplingRow(prompt_only, 0, output=all_of(*((1,), ())))).token_id == 2


@pytest.mark.parametrize("num_top_logprobs", [None, 1])
def test_greedy_takes_the_lowest_id_of_equals(num_top_logprobs: int | None) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 17, 18]] = 1.0
    logits[1, [0, 4998]] = 1.0
    rows = [SamplingRow(SamplingParams(temperature=0), 0, num_top_logprobs)] * 3
    assert [token.token_id for token in sample(logits, rows)] == [17, 0, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0, logit_bias=((0, 50.0),), top_k=1)
    token = draw_one(LN, SamplingRow(params, 0, num_top_logprobs=2))
    assert token.token_id == 0
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(math.log(0.1), rel=1e-6)
    assert [i for i, _ in token.logprobs.top] == [1, 3]
    assert [p for _, p in token.logprobs.top] == pytest.approx(
        [math.log(0.4), math.log(0.3)], rel=1e-6
    )


def test_logprobs_equal_log_softmax() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)) * 5
    token = sample(
        logits, [SamplingRow(SamplingParams(seed=3, temperature=2.0), 5, num_top_logprobs=20)]
    )[0]
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), rel=1e-12)
    values, ids = expected.topk(20)
    assert [i for i, _ in token.logprobs.top] == ids.tolist()
    assert [p for _, p in token.logprobs.top] == pytest.approx(values.tolist(), rel=1e-12)


def test_logprobs_of_equals_come_by_lower_id() -> None:
    token = draw_one(
        [1.0, 2.0, 2.0, 1.0, 2.0], SamplingRow(SamplingParams(temperature=0), 0, num_top_logprobs=4)
    )
    assert token.logprobs is not None
    assert [i for i, _ in token.logprobs.top] == [1, 2, 4, 0]


@pytest.mark.parametrize(("num_top", "length"), [(None, None), (0, 0), (2, 2), (99, 4)])
def test_the_requested_number_of_logprobs(num_top: int | None, length: int | None) -> None:
    token = draw_one(LN, SamplingRow(SamplingParams(), 0, num_top_logprobs=num_top))
    assert (None if token.logprobs is None else len(token.logprobs.top)) == length


def test_largest_orders_by_value_then_id() -> None:
    assert largest(np.tile([1.0, 2.0], 50), 70).tolist() == [*range(1, 100, 2), *range(0, 40, 2)]
    values = np.array([1.0, 3.0, 2.0, 3.0, -np.inf])
    assert [largest(values, n).tolist() for n in (0, 1, 3, 5, 9)] == [
        [],
        [1],
        [1, 3, 2],
        [1, 3, 2, 0, 4],
        [1, 3, 2, 0, 4],
    ]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.9},
    ],
)
def test_counts_follow_the_distribution(params: dict[str, object]) -> None:
    """Each share within four standard deviations over 4,000 positions; a token of share 0 never."""
    logits = [math.log(p) for p in (0.05, 0.3, 0.2, 0.25, 0.02, 0.18)]
    shares, num_draws = share_of(logits, **params), 4000
    rows = [row(position, seed=11, **params) for position in range(num_draws)]
    counts = Counter(token.token_id for token in sample(torch.tensor([logits] * num_draws), rows))
    assert set(counts) <= set(shares)
    for token_id, share in shares.items():
        noise = math.sqrt(num_draws * share * (1 - share))
        assert abs(counts[token_id] - num_draws * share) <= 4 * noise


def test_the_draw_inverts_the_cumulative_distribution() -> None:
    """Shares of 1/4 of ids 1..4 between ids of no weight: the quarter of the random number tells
    the id."""
    logits = [-math.inf, 0.0, 0.0, 0.0, 0.0, -math.inf]
    for position in range(200):
        assert draw_one(logits, row(position, seed=7)).token_id == 1 + int(4 * uniform(7, position))


@pytest.mark.parametrize("point", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_draw_tokens_of_weight(
    point: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sampling.sampler.uniform", lambda seed, position: point)
    for weights in (
        [0.0, 1.0, 2.0, 0.0],
        [0.0, 0.1, 0.2, 0.7, 0.0, 0.0],
        [0.0, 1 / 3, 1 / 3, 1 / 3, 0.0],
    ):
        logits = [math.log(w) if w else -math.inf for w in weights]
        expected = 1 if point == 0 else max(i for i, w in enumerate(weights) if w)
        assert draw_one(logits, row()).token_id == expected


def random_rows(num_rows: int, vocab_size: int) -> list[SamplingRow]:
    """Return rows with a mix of all client options."""
    rng = random.Random(4)
    choices = itertools.product(
        [0.0, 0.7, 1.0], [0, 5], [1.0, 0.9], [0.0, 0.1], [None, 3], [0.0, 0.5]
    )
    rows = []
    for seed, (temperature, top_k, top_p, min_p, num_top, penalty) in zip(
        range(num_rows), rng.sample(list(choices), num_rows), strict=True
    ):
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            frequency_penalty=penalty,
            logit_bias=((seed, 1.5),) if seed % 2 else (),
        )
        history = (
            (tuple(range(20)), tuple(rng.randrange(vocab_size) for _ in range(30)))
            if penalty
            else None
        )
        rows.append(
            SamplingRow(
                params,
                100 + seed,
                num_top,
                (seed + 1,) if seed % 3 == 0 else (),
                output=None if history is None else all_of(*history),
            )
        )
    return rows


def test_a_row_is_bit_equal_in_every_batch() -> None:
    vocab_size = 5003
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(2)) * 4
    rows = random_rows(24, vocab_size)
    whole = sample(logits, rows)
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(24)] == whole
    assert sample(logits.flip(0), rows[::-1]) == whole[::-1]
    assert sample(logits[5:12].clone(), rows[5:12]) == whole[5:12]
    padded = torch.full((24, vocab_size + 61), math.nan)[:, :vocab_size]
    padded.copy_(logits)
    assert sample(padded, rows) == whole


def test_greedy_rows_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(4, 999, generator=torch.Generator().manual_seed(3))
    alone = sample(logits, [row(temperature=0)] * 4)
    mixed = sample(logits, [row(temperature=0), row(seed=1), row(temperature=0), row(seed=2)])
    assert [alone[0], alone[2]] == [mixed[0], mixed[2]]
    assert [token.token_id for token in alone] == logits.argmax(dim=-1).tolist()


def test_sampling_twice_gives_the_same_and_changes_nothing() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    before, rows = logits.clone(), random_rows(6, 300)
    assert sample(logits, rows) == sample(logits, rows)
    assert torch.equal(logits, before)


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, 1000)
    drawn = {
        (s, p): sample(logits, [row(p, seed=s)])[0].token_id for s in range(10) for p in range(10)
    }
    assert len(set(drawn.values())) > 80
    assert drawn[3, 4] == int(1000 * uniform(3, 4))


def test_walking_a_draft_tree_emits_what_plain_decoding_emits() -> None:
    """Target logits as a function of the path; a draft tree of two children per node, verified node
    by node."""

    def logits_after(path: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(1, 5, generator=torch.Generator().manual_seed(hash(path) % 2**31))

    def sampling_row(path: tuple[int, ...], seed: int) -> SamplingRow:
        params = SamplingParams(temperature=0.9, presence_penalty=0.4, seed=seed)
        return SamplingRow(params, position=10 + len(path), output=all_of((1, 2), path))

    for seed in range(30):
        plain: tuple[int, ...] = ()
        for _ in range(4):
            plain += (sample(logits_after(plain), [sampling_row(plain, seed)])[0].token_id,)
        nodes = [path for depth in range(4) for path in itertools.product((0, 1), repeat=depth)]
        verified = sample(
            torch.cat([logits_after(n) for n in nodes]), [sampling_row(n, seed) for n in nodes]
        )
        drawn = {node: token.token_id for node, token in zip(nodes, verified, strict=True)}
        walked: tuple[int, ...] = ()
        while walked in drawn:
            walked += (drawn[walked],)
        assert walked == plain[: len(walked)]
        assert len(walked) >= 1


def test_no_rows_draw_nothing() -> None:
    assert sample(torch.empty(0, 10), []) == []


def test_rows_must_fit_the_logits() -> None:
    with pytest.raises(InternalError, match="2 rows of logits came with 1 sampling rows"):
        sample(torch.zeros(2, 10), [row()])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_went_wrong_are_never_sampled(bad: float, temperature: float) -> None:
    """Other rows of the batch are sampled as if alone."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, bad, 2.0], [4.0, 3.0, 2.0]])
    good, wrong, better = sample(logits, [row(temperature=temperature)] * 3)
    assert isinstance(wrong.error, InternalError)
    assert f"largest logit of a row is {bad}" in str(wrong.error)
    assert good == draw_one([1.0, 3.0, 2.0], row(temperature=temperature))
    assert better == draw_one([4.0, 3.0, 2.0], row(temperature=temperature))


@pytest.mark.parametrize("temperature", [0, 1])
def test_banning_every_token_is_an_error(temperature: float) -> None:
    drawn = draw_one(
        [1.0, 2.0], SamplingRow(SamplingParams(temperature=temperature), 0, banned_token_ids=(0, 1))
    )
    assert isinstance(drawn.error, InternalError)
    assert "-inf" in drawn.problem


def test_a_banned_token_is_never_sampled() -> None:
    rows = [SamplingRow(SamplingParams(seed=s), 0, banned_token_ids=(2,)) for s in range(300)]
    drawn = {token.token_id for token in sample(torch.tensor([[0.0, 0.0, 9.0]] * 300), rows)}
    assert drawn == {0, 1}
