"""Operations of a batch on recurrent states, besides advancing its rows. Plain data."""

from typing import NamedTuple


class StateSnapshot(NamedTuple):
    """A copy of the recurrent state after the first `num_tokens` tokens, into slot `slot_id`.

    `num_tokens` is a multiple of the model's chunk grid.
    """

    num_tokens: int
    slot_id: int


class StateRow(NamedTuple):
    """One row's operations on recurrent state.

    Attributes:
        resumed_slot: the slot whose state is copied into the row's own before it runs; 0, the null
            slot, to continue from its own.
        snapshots: ordered by position; after the row's first token and before its last.
    """

    resumed_slot: int = 0
    snapshots: tuple[StateSnapshot, ...] = ()


NO_STATES = StateRow()
