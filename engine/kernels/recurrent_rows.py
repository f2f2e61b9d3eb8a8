"""Kernel arguments that describe the states of a batch's rows."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RecurrentRows:
    """All R rows of a batch.

    Attributes:
        starts: [R + 1] int64, the rows' first tokens, and the end.
        slots: [R] int64, the slots of their states.
        is_new: [R] int64, 1 if the row starts from a zero state whatever its slot holds.
    """

    starts: Tensor
    slots: Tensor
    is_new: Tensor


@dataclass(frozen=True)
class StateSteps:
    """The source and the destination of the states of T tokens.

    Attributes:
        parents: [T] int64, the earlier token of the row that each token continues; -1 for the row's
            slot.
        targets: [T] int64, the record for the state after the token.
    """

    parents: Tensor
    targets: Tensor
