"""What clients send."""

import pytest

from baton.workload import Planned
from sim.clients import BLOCK_TOKENS, packed_prompt, prompt_of
from sim.worker import VOCAB_SIZE

OWN = VOCAB_SIZE - 1 - 3


@pytest.mark.parametrize(("planned", "expected"), [
    (Planned(0.0, 5, 1), [OWN] * 5),
    (Planned(0.0, BLOCK_TOKENS + 2, 1, (0, 300)), [1] * BLOCK_TOKENS + [301] * 2),
    (Planned(0.0, 2 * BLOCK_TOKENS + 1, 1, (126, 127)), [127] * BLOCK_TOKENS + [128] * BLOCK_TOKENS + [OWN]),
    (Planned(0.0, 3, 1, (7, 8)), [8] * 3),
])
def test_a_prompt_is_the_same_on_the_wire(planned: Planned, expected: list[int]) -> None:
    assert list(prompt_of(3, planned)) == expected
    assert list(packed_prompt(3, planned).prompt_token_ids) == expected
