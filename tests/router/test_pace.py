"""Requests whose time cannot suffice are refused before any worker hears of them; the others are tried."""

import pytest

from router.pace import MIN_TOKENS, PrefillPace
from runtime.errors import DeadlineError
from tests.router.harness import running_router, token_request
from tests.support.fake_workers import Fabric, FakeDecode, FakePrefill, Journal, expected_tokens


def test_the_best_pace_counts_and_short_prompts_do_not() -> None:
    pace = PrefillPace()
    assert pace.least_s(1000) == 0
    pace.observe(MIN_TOKENS - 1, 1e-9)
    assert pace.least_s(1000) == 0
    pace.observe(100, 2.0)
    pace.observe(200, 1.0)
    pace.observe(100, 5.0)
    assert pace.least_s(1000) == pytest.approx(5.0)
    assert pace.least_s(MIN_TOKENS - 1) == 0


async def test_a_deadline_that_cannot_be_met_is_refused_before_prefill() -> None:
    """The fakes say that a prompt took 0.125 s."""
    fabric, journal = Fabric(), Journal()
    prompt = [1] * 100
    async with running_router(FakePrefill("prefill", fabric, journal), FakeDecode("decode", fabric, journal)) as router:
        for _ in range(2):
            assert (await router.ask(token_request(prompt))).token_ids == expected_tokens(prompt, 4)
        heard = len(journal.entries)
        error = await router.failure(token_request(prompt), timeout_s=0.1)
        assert isinstance(error, DeadlineError)
        await router.assert_nothing_left()
        assert len(journal.entries) == heard
        assert (await router.ask(token_request(prompt), timeout_s=5)).token_ids == expected_tokens(prompt, 4)
        assert (await router.ask(token_request([1]), timeout_s=0.1)).token_ids == expected_tokens([1], 4)
