"""States that are handed out within a row, and rows that go on from them: the bits of a prompt read
in one piece."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.recurrent import CpuRecurrent
from engine.backends.recurrent_batch import SnapshotRecurrent
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.numerics import Numerics
from engine.core.state_rows import StateRow, StateSnapshot
from runtime.errors import InternalError
from tests.support.kernels.batches import Row, make_batch
from tests.support.kernels.recurrent import (
    CHANNELS,
    K_DIM,
    KERNEL,
    LAYER,
    NUM_SLOTS,
    V_DIM,
    V_HEADS,
    WEIGHT,
    Tokens,
    feed,
)


class Rig:
    """A backend over pools that hold NaN."""

    def __init__(self) -> None:
        self.conv = torch.full((NUM_SLOTS, KERNEL - 1, CHANNELS), torch.nan)
        self.state = torch.full((NUM_SLOTS, V_HEADS, K_DIM, V_DIM), torch.nan)
        pools = {"conv_pools": {LAYER: self.conv}, "state_pools": {LAYER: self.state}}
        self.recurrent = SnapshotRecurrent(CpuRecurrent(**pools, numerics=Numerics.EXACT), **pools)

    def run(self, *parts: tuple[Tokens, int, StateRow]) -> list[tuple[Tensor, Tensor]]:
        """Run one prefill batch with this many tokens of each; return its convolved channels and
        outputs by row."""
        batch = make_batch(
            ForwardMode.PREFILL, [Row(count, each.fed, slot=each.slot) for each, count, _ in parts]
        )
        return self.run_batch(replace(batch, states=tuple(states for *_, states in parts)), *parts)

    def run_batch(
        self, batch: ForwardBatch, *parts: tuple[Tokens, int, StateRow]
    ) -> list[tuple[Tensor, Tensor]]:
        cut = [slice(each.fed, each.fed + count) for each, count, _ in parts]
        q, k, v, g, beta = (
            torch.cat([each.inputs[i][part] for (each, *_), part in zip(parts, cut, strict=True)])
            for i in range(5)
        )
        x = torch.cat([each.x[part] for (each, *_), part in zip(parts, cut, strict=True)])
        self.recurrent.commit(batch)
        conv = self.recurrent.causal_conv(LAYER, x, WEIGHT, batch)
        out = self.recurrent.gated_delta_rule(LAYER, q, k, v, g, beta, batch)
        for each, count, _ in parts:
            each.fed += count
        counts = [count for _, count, _ in parts]
        return list(zip(torch.split(conv, counts), torch.split(out, counts), strict=True))


def alone(seed: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return convolved channels, outputs and both states after the first tokens of a prompt, run in
    one chunk."""
    rig, tokens = Rig(), Tokens(400, seed=seed, slot=1)
    ((conv, out),) = rig.run((tokens, num_tokens, StateRow()))
    return conv, out, rig.conv[1], rig.state[1]


def states_at(rig: Rig, slot: int) -> tuple[Tensor, Tensor]:
    return rig.conv[slot], rig.state[slot]


def test_states_within_a_chunk_are_those_of_a_prompt_that_ends_there() -> None:
    rig = Rig()
    first, second, third = (
        Tokens(400, seed=1, slot=1),
        Tokens(400, seed=2, slot=2),
        Tokens(400, seed=3, slot=3),
    )
    rows = rig.run(
        (first, 330, StateRow(snapshots=(StateSnapshot(64, 4), StateSnapshot(256, 5)))),
        (second, 130, StateRow()),
        (third, 128, StateRow(snapshots=(StateSnapshot(128, 6),))),
    )
    for (conv, out), seed, count in zip(rows, (1, 2, 3), (330, 130, 128), strict=True):
        expected = alone(seed, count)
        assert torch.equal(conv, expected[0])
        assert torch.equal(out, expected[1])
        for ours, theirs in zip(states_at(rig, seed), expected[2:], strict=True):
            assert torch.equal(ours, theirs)
    for slot, seed, count in ((4, 1, 64), (5, 1, 256), (6, 3, 128)):
        for ours, theirs in zip(states_at(rig, slot), alone(seed, count)[2:], strict=True):
            assert torch.equal(ours, theirs), f"snapshot of {seed} at {count}"


def test_positions_of_snapshots_do_not_depend_on_chunks() -> None:
    rig, tokens = Rig(), Tokens(400, seed=1, slot=1)
    rig.run((tokens, 128, StateRow()))
    rig.run((tokens, 200, StateRow(snapshots=(StateSnapshot(192, 4),))))
    assert torch.equal(rig.state[4], alone(1, 192)[3])
    assert torch.equal(rig.conv[4], alone(1, 192)[2])


def test_a_row_continues_a_kept_state_without_changing_it() -> None:
    rig, tokens = Rig(), Tokens(400, seed=1, slot=1)
    rig.run((tokens, 300, StateRow(snapshots=(StateSnapshot(192, 4),))))
    kept = [state.clone() for state in states_at(rig, 4)]
    warm = Tokens(400, seed=1, slot=2)
    warm.fed = 192
    ((conv, out),) = rig.run(
        (warm, 208, StateRow(resumed_slot=4, snapshots=(StateSnapshot(256, 5),)))
    )
    cold = alone(1, 400)
    assert torch.equal(conv, cold[0][192:])
    assert torch.equal(out, cold[1][192:])
    assert torch.equal(rig.state[2], cold[3])
    assert torch.equal(rig.state[5], alone(1, 256)[3])
    assert all(
        torch.equal(now, before) for now, before in zip(states_at(rig, 4), kept, strict=True)
    )


@pytest.mark.parametrize("num_tokens", [64, 320])
def test_a_snapshot_outside_its_row_is_a_bug(num_tokens: int) -> None:
    rig, tokens = Rig(), Tokens(400, seed=1, slot=1)
    feed(rig.recurrent, ForwardMode.PREFILL, (tokens, 64))
    with pytest.raises(InternalError, match=f"a snapshot at {num_tokens} of a row from 64 to 256"):
        rig.run((tokens, 192, StateRow(snapshots=(StateSnapshot(num_tokens, 4),))))
