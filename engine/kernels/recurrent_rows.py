"""The arguments by which kernels find the states of a batch's rows."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RecurrentRows:
    """All R rows of a batch.

    starts   [R + 1] int64, the rows' first tokens, and the end
    slots    [R] int64, where their states are
    is_new   [R] int64, 1 where a row starts from a zero state whatever its slot holds
    """

    starts: Tensor
    slots: Tensor
    is_new: Tensor


@dataclass(frozen=True)
class StateSteps:
    """Where T tokens take their states from and put them.

    parents  [T] int64, the token that each one continues, which stands before it in its row; -1: its row's slot
    targets  [T] int64, the record that gets the state after the token
    """

    parents: Tensor
    targets: Tensor
