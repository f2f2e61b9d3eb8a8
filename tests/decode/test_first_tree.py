"""Requests whose first tree is grown from handed-over state, with hand-made results."""

from dataclasses import replace

import pytest

from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, TokenTree, Verified
from engine.core.request import Request, SampledToken
from engine.pipeline.results import StepFailed, StepResult
from tests.decode.test_scheduler import Client, make, request

TREE = TokenTree((106, 107, 9), (-1, 0, 0))


def drafting() -> DecodeScheduler:
    scheduler = make()
    scheduler.limits = replace(scheduler.limits, num_draft_tokens=3)
    return scheduler


def joined(scheduler: DecodeScheduler, wanted: Request) -> tuple[int, Client]:
    client = Client()
    key = scheduler.reserve(wanted, client.events.append).key
    scheduler.join(key, 105, with_draft=True)
    return key, client


def next_batch(scheduler: DecodeScheduler) -> ForwardBatch:
    batch = scheduler.next_batch()
    assert batch is not None
    return batch


def test_the_first_tree_is_grown_before_the_first_step_and_verified_by_it() -> None:
    scheduler = drafting()
    key, client = joined(scheduler, request(prompt=5, max_tokens=8))
    begun = next_batch(scheduler)
    assert (begun.mode, begun.request_keys, begun.context_lens, begun.num_tokens) == (
        ForwardMode.PREBUILT,
        (key,),
        (5,),
        0,
    )
    assert isinstance(begun.spec_info, SpecInfo)
    assert begun.spec_info.rows[0].num_draft_tokens == 3
    assert scheduler.next_batch() is None, "it is in flight"
    scheduler.on_result(begun, StepResult(1, [], verified=[Verified((), TREE)]))
    step = next_batch(scheduler)
    assert step.mode is ForwardMode.VERIFY
    assert step.token_ids is not None
    assert step.token_ids.tolist() == [105, *TREE.token_ids]
    tokens = [SampledToken(token) for token in (106, 107, 108)]
    scheduler.on_result(step, StepResult(2, tokens, verified=[Verified((0, 1, 2))]))
    assert client.tokens == [106, 107, 108]
    assert next_batch(scheduler).mode is ForwardMode.DECODE


@pytest.mark.parametrize(
    "case", ["no draft came", "declined", "one token left", "drafts do not pay now", "replayed"]
)
def test_otherwise_the_first_step_has_no_tree(case: str) -> None:
    scheduler, wanted = (
        drafting(),
        request(prompt=5, max_tokens=2 if case == "one token left" else 8),
    )
    if case == "drafts do not pay now":
        scheduler.draft_length = lambda num_running: 0
    if case == "declined":
        wanted = replace(wanted, speculates=False)
    replayed = (106,) if case == "replayed" else ()
    key = scheduler.reserve(wanted, lambda event: None, replayed=replayed).key
    scheduler.join(key, 105, with_draft=case != "no draft came")
    assert next_batch(scheduler).mode is (
        ForwardMode.PREFILL if case == "replayed" else ForwardMode.DECODE
    )


def test_a_request_that_goes_while_its_first_tree_grows_leaves_nothing() -> None:
    scheduler = drafting()
    key, _ = joined(scheduler, request())
    begun = next_batch(scheduler)
    scheduler.release(key)
    scheduler.on_result(begun, StepResult(1, [], verified=[Verified((), TREE)]))
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_a_first_tree_that_fails_fails_its_request() -> None:
    scheduler = drafting()
    _, client = joined(scheduler, request())
    scheduler.on_result(next_batch(scheduler), StepResult(1, [], StepFailed("stage 0: no")))
    assert "no" in str(client.last)
