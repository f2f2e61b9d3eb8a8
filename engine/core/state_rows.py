"""What a batch does with recurrent states besides advancing those of its rows. Plain data."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """The state after the first `num_tokens` tokens of the request, a multiple of the model's chunk
    grid, and the slot that it is copied to."""

    num_tokens: int
    slot_id: int


class StateRow(NamedTuple):
    """One row's share. `resumed_slot`: the row goes on from the state in that slot, which is copied
    into its own before it runs; 0, the null slot: from its own. `snapshots`, by position, lie
    behind the row's first token and not behind its last."""

    resumed_slot: int = 0
    snapshots: tuple[Snapshot, ...] = ()


NO_STATES = StateRow()
