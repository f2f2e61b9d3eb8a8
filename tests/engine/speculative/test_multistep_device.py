"""Rounds whose committed keys stay in their pages, against rounds that gather them."""

import pytest
import torch

from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.speculative.attention.draft_attention import RoundAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_device import DeviceRounds
from engine.speculative.contracts.config import MAX_STEPS
from runtime.errors import InternalError, StalePlanError
from tests.support.kernels.flashinfer import FakeWrappers

PAGE_SIZE, DIM, HEADS, KV_HEADS = 4, 8, 6, 2
GEOMETRY = AttentionGeometry(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE_SIZE, scale=0.4
)
TABLES = ((3, 1, 7), (2, 8, 4), (5, 6, 9))


def pools() -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        layer: torch.randn(10, 2, KV_HEADS, PAGE_SIZE, DIM, generator=generator)
        for layer in range(2)
    }


def device_rounds() -> DeviceRounds:
    return DeviceRounds(
        kv_pools=pools(), geometry=GEOMETRY, wrappers=FakeWrappers(), device=torch.device("cpu")
    )


def round_of(lengths: tuple[int, ...], branches: int) -> ForwardBatch:
    rows = len(lengths)
    return ForwardBatch(
        mode=ForwardMode.DRAFT,
        request_keys=tuple(range(rows)),
        query_lens=(branches,) * rows,
        context_lens=lengths,
        token_ids=None,
        positions=torch.tensor(lengths).repeat_interleave(branches),
        page_tables=torch.tensor(TABLES[:rows], dtype=torch.int32),
        slot_ids=torch.zeros(rows, dtype=torch.int32),
        sampling=(None,) * rows,
    )


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("lengths", [(1,), (4, 11, 6), (12, 5)])
def test_a_round_equals_attention_to_gathered_keys(lengths: tuple[int, ...], branches: int) -> None:
    """Three steps of two layers, with new branches chosen in between."""
    backends: tuple[RoundAttention, ...] = (
        device_rounds(),
        MultiStepAttention(kv_pools=pools(), geometry=GEOMETRY),
    )
    batches = [round_of(lengths, branches) for _ in backends]
    generator = torch.Generator().manual_seed(2)
    for backend, batch in zip(backends, batches, strict=True):
        backend.plan(batch)
    for _ in range(3):
        for layer in range(2):
            q = torch.randn(len(lengths) * branches, HEADS, DIM, generator=generator)
            k, v = torch.randn(2, len(lengths) * branches, KV_HEADS, DIM, generator=generator)
            actual, expected = (
                backend.run(layer, q, k, v, batch)
                for backend, batch in zip(backends, batches, strict=True)
            )
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        parents = torch.randint(branches, (len(lengths), branches), generator=generator)
        for backend, batch in zip(backends, batches, strict=True):
            backend.reorder(batch, parents)


def test_a_round_has_room_for_the_steps_that_may_be_configured() -> None:
    rounds, batch = MultiStepAttention(kv_pools=pools(), geometry=GEOMETRY), round_of((4, 5), 2)
    rounds.plan(batch)
    kv = torch.ones(4, KV_HEADS, DIM)
    for _ in range(MAX_STEPS):
        rounds.run(0, torch.ones(4, HEADS, DIM), kv, kv, batch)
    with pytest.raises(InternalError, match=f"at most {MAX_STEPS} steps"):
        rounds.run(0, torch.ones(4, HEADS, DIM), kv, kv, batch)


def test_a_wrapper_that_was_planned_for_another_round_is_never_run() -> None:
    rounds, first = device_rounds(), round_of((4, 5), 2)
    rounds.plan(first)
    for _ in range(2):  # as many as may be in flight
        rounds.plan(round_of((4, 5), 2))
    kv = torch.ones(4, KV_HEADS, DIM)
    with pytest.raises(StalePlanError):
        rounds.run(0, torch.ones(4, HEADS, DIM), kv, kv, first)
    with pytest.raises(InternalError):
        rounds.plan(round_of((4, 0), 2))
