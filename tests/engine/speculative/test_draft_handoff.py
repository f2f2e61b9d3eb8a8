"""State that a draft hands over, in slots that other requests have used before."""

import torch

from engine.speculative.trees.draft_handoff import DraftEnd, HandedEnds


def ends(keys: list[list[int]] | None) -> DraftEnd:
    """Return the ends of one row; only its keys matter."""
    return DraftEnd(
        torch.zeros(1, 1),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, 4),
        None if keys is None else torch.tensor(keys, dtype=torch.int32),
    )


def test_a_slot_keeps_nothing_of_the_choice_before() -> None:
    """A short prompt's choice is narrower than the last one's in the same slot."""
    handed = HandedEnds(
        torch.zeros(3, 1),
        torch.zeros(3, 1, dtype=torch.int64),
        torch.zeros(3, 4),
        torch.full((3, 6), -1, dtype=torch.int32),
    )
    slot = torch.tensor([1])
    for chosen in ([[4, 5, 6, 7]], [[2, 3]]):
        handed.put(slot, ends(chosen))
        found = handed.get(slot).keys
        assert found is not None
        assert found.tolist() == chosen
    handed.put(slot, ends(None))
    found = handed.get(slot).keys
    assert found is not None
    assert found.shape == (1, 0)


def test_rows_are_filled_up_to_the_widest_choice() -> None:
    handed = HandedEnds(
        torch.zeros(3, 1),
        torch.zeros(3, 1, dtype=torch.int64),
        torch.zeros(3, 4),
        torch.full((3, 6), -1, dtype=torch.int32),
    )
    handed.put(torch.tensor([1]), ends([[4, 5, 6]]))
    handed.put(torch.tensor([2]), ends([[9]]))
    found = handed.get(torch.tensor([2, 1])).keys
    assert found is not None
    assert found.tolist() == [[9, -1, -1], [4, 5, 6]]
