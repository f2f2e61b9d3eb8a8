"""Steps prepared before the previous result: which requests take part, what happens to those that
ended, and equal bits. The stage's side is in `tests/engine/pipeline/test_ahead.py`."""

from dataclasses import replace

import pytest
import torch

from decode.entry import DecodeEntryEvent, DecodeLimits, Finished
from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.request import FinishReason, ProblemCause, Request, SampledToken, SamplingParams
from engine.core.rows import NOT_SAMPLED
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from pool.prefix.resume_rule import ResumeRule
from pool.request.entry import Failed
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.errors import DeadlineError, PeerLostError
from runtime.grammar import Grammar, GrammarKind
from tests.decode.test_scheduler import Client, answer, joined, request
from tests.decode.test_self_equality import requests, shown
from tests.support.models.tiny_models import DEEPSEEK_V3, GEMMA3, HYBRID, QWEN3, tiny
from tests.support.pool.local_pool import Answer, LocalPool, call, local_pool

PAGE = 4


def make(*, num_pages: int = 40, max_running: int = 4, max_held: int = 0) -> DecodeScheduler:
    return DecodeScheduler(
        pages=PageAllocator(num_pages),
        slots=SlotAllocator(0),
        cache_rule=ResumeRule(PAGE),
        clock=ManualClock(),
        limits=DecodeLimits(
            page_size=PAGE,
            grid=1,
            depth=1,
            max_running=max_running,
            max_held=max_held,
            max_context_tokens=64,
            chunk_tokens=8,
            growth_tokens=PAGE,
            steps_ahead=True,
        ),
    )


def launched(scheduler: DecodeScheduler) -> ForwardBatch:
    batch = scheduler.next_batch()
    assert batch is not None
    return batch


def ids(batch: ForwardBatch) -> list[int]:
    assert batch.token_ids is not None
    return batch.token_ids.tolist()


def end(scheduler: DecodeScheduler, *batches: ForwardBatch) -> None:
    """Deliver results in flight in order and run what follows, two at a time, until everything is
    released."""
    in_flight = list(batches)
    while True:
        while len(in_flight) < 2 and (batch := scheduler.next_batch()) is not None:
            in_flight.append(batch)
        if not in_flight:
            break
        answer(scheduler, in_flight.pop(0))
    scheduler.cache.clear()
    assert scheduler.pages.num_free == scheduler.pages.num_total
    scheduler.on_idle()


def test_the_next_step_is_there_before_the_result_of_the_one_in_flight() -> None:
    scheduler = make()
    _, client = joined(scheduler, request(prompt=5, max_tokens=5))
    first, second = launched(scheduler), launched(scheduler)
    assert (ids(first), ids(second)) == ([100], [NOT_SAMPLED])
    assert (first.context_lens, second.context_lens) == ((5,), (6,))
    assert second.positions.tolist() == [6]
    assert [row.position for row in second.sampling if row is not None] == [7]
    assert client.events == []
    end(scheduler, first, second)
    assert client.tokens == [106, 107, 108, 109]


def test_no_step_follows_the_last_token_by_length() -> None:
    scheduler = make()
    _, short = joined(scheduler, request(prompt=5, max_tokens=2))
    _, long = joined(scheduler, request(prompt=5, max_tokens=3))
    first, second = launched(scheduler), launched(scheduler)
    assert (first.num_rows, second.num_rows) == (2, 1)
    assert second.request_keys == first.request_keys[1:]
    end(scheduler, first, second)
    assert (short.tokens, long.tokens) == ([106], [106, 107])


def test_the_context_limit_is_a_length_too() -> None:
    scheduler = make()
    scheduler.limits = replace(scheduler.limits, max_context_tokens=8)
    joined(scheduler, request(prompt=5, max_tokens=3))
    first, second = launched(scheduler), launched(scheduler)
    assert ids(second) == [NOT_SAMPLED]
    answer(scheduler, first)
    assert scheduler.next_batch() is None, "the eighth token is in flight"
    end(scheduler, second)


def test_a_stop_token_drops_the_row_ahead_and_keeps_pages_until_it_ends() -> None:
    scheduler = make()
    key, client = joined(scheduler, request(stop=frozenset({106})))
    _, other = joined(scheduler, request())
    first, second = launched(scheduler), launched(scheduler)
    free = scheduler.pages.num_available
    answer(scheduler, first)
    assert isinstance(client.last, Finished)
    assert client.last.reason is FinishReason.STOP
    assert scheduler.pages.num_available == free, "the step ahead still writes there"
    assert scheduler.occupancy().leases == {"landing": 0, "running": 2}
    scheduler.release(key)
    assert scheduler.pages.num_available == free
    third = launched(scheduler)
    assert key not in third.request_keys
    answer(scheduler, second)
    assert scheduler.pages.num_available > free
    assert client.tokens == [106], "what was drawn behind the stop token is dropped"
    end(scheduler, third)
    assert other.tokens == [106 + i for i in range(7)]


def test_pages_written_by_the_step_ahead_are_not_cached() -> None:
    """Of 16 tokens the last was sampled, and its entry, the page's last, is the step ahead's."""
    scheduler, client = make(), Client()
    prompt = tuple(range(14))
    wanted = Request("r", prompt, 8, SamplingParams(temperature=0), stop_token_ids=frozenset({115}))
    key = scheduler.reserve(
        wanted,
        client.events.append,
        blocks=block_names(prompt, PAGE, compatibility="c"),
        compatibility="c",
    ).key
    scheduler.join(key, 114)
    first, second = launched(scheduler), launched(scheduler)
    answer(scheduler, first)
    assert client.tokens == [115]
    names = block_names((*prompt, 114, 115, 7), PAGE, compatibility="c")
    assert scheduler.cache.find(names, 17).num_tokens == 12
    end(scheduler, second)


GUIDED = Grammar.of(GrammarKind.REGEX, "a*")
DEPENDENT = {
    "penalty": {"sampling": SamplingParams(temperature=0, frequency_penalty=0.5)},
    "grammar": {"grammar": GUIDED},
}


@pytest.mark.parametrize("what", DEPENDENT)
def test_rows_that_depend_on_the_token_wait_for_it(what: str) -> None:
    """So do all that would be in one batch with it."""
    scheduler = make()
    joined(scheduler, request())
    _, client = joined(scheduler, replace(request(), **DEPENDENT[what]))  # type: ignore[arg-type]
    first = launched(scheduler)
    assert scheduler.next_batch() is None
    answer(scheduler, first)
    second = launched(scheduler)
    assert NOT_SAMPLED not in ids(second)
    end(scheduler, second)
    assert isinstance(client.last, Finished)


def test_a_prompt_that_is_to_be_read_waits_for_the_step_in_flight() -> None:
    scheduler, client = make(), Client()
    _, stream = joined(scheduler, request())
    first = launched(scheduler)
    scheduler.submit_local(request(prompt=12, max_tokens=3), client.events.append)
    assert scheduler.next_batch() is None
    answer(scheduler, first)
    reading = launched(scheduler)
    assert (reading.mode, reading.query_lens) == (ForwardMode.PREFILL, (1, 8))
    assert scheduler.next_batch() is None, "the rest of the prompt is to be read beside the stream"
    answer(scheduler, reading)
    last = launched(scheduler)
    ahead = launched(scheduler)
    assert (last.query_lens, ids(ahead)) == ((1, 4), [NOT_SAMPLED] * 2), (
        "the prompt's first token is due"
    )
    end(scheduler, last, ahead)
    assert client.tokens == [112, 113, 114]
    assert isinstance(stream.last, Finished)


def test_a_prompt_of_one_token_is_to_be_read_too() -> None:
    """With a recurrent layer, a token has other bits prefilled than decoded."""
    scheduler, client = make(), Client()
    joined(scheduler, request())
    first = launched(scheduler)
    scheduler.submit_local(request(prompt=1, max_tokens=2), client.events.append)
    assert scheduler.next_batch() is None
    answer(scheduler, first)
    assert launched(scheduler).mode is ForwardMode.PREFILL


def test_a_request_that_joins_meanwhile_is_in_the_step_ahead() -> None:
    scheduler = make()
    joined(scheduler, request())
    first = launched(scheduler)
    joined(scheduler, request())
    second = launched(scheduler)
    assert sorted(ids(second)) == [NOT_SAMPLED, 100]
    end(scheduler, first, second)


def test_turns_go_round_among_more_than_may_run() -> None:
    scheduler = make(max_running=2, max_held=3)
    for _ in range(3):
        joined(scheduler, request())
    first, second = launched(scheduler), launched(scheduler)
    assert (first.request_keys, second.request_keys) == ((1, 2), (3, 1))
    assert ids(second) == [100, NOT_SAMPLED]
    end(scheduler, first, second)


def test_short_pages_are_decided_with_nothing_in_flight() -> None:
    """Six usable pages, and both want four in the end: the younger is set back, as without steps
    ahead."""
    scheduler = make(num_pages=7)
    _, first = joined(scheduler, request(prompt=5, max_tokens=9))
    _, second = joined(scheduler, request(prompt=5, max_tokens=9))
    end(scheduler)
    for client, num_preemptions in ((first, 0), (second, 1)):
        assert client.tokens == [105 + i for i in range(1, 9)]
        assert isinstance(client.last, Finished)
        assert client.last.num_preemptions == num_preemptions


def test_a_preempted_request_is_requeued_before_the_next_step() -> None:
    scheduler = make(num_pages=7)
    for _ in range(2):
        joined(scheduler, request(prompt=5, max_tokens=9))
    batch = launched(scheduler)
    while not scheduler.load().queued_requests:
        answer(scheduler, batch)
        batch = launched(scheduler)
    assert scheduler.pages.num_available > 0
    assert scheduler.next_batch() is None
    end(scheduler, batch)


def test_a_release_frees_when_both_steps_are_back() -> None:
    scheduler = make()
    key, client = joined(scheduler, request())
    first, second = launched(scheduler), launched(scheduler)
    scheduler.release(key)
    assert scheduler.next_batch() is None
    answer(scheduler, first)
    assert scheduler.pages.num_free < scheduler.pages.num_total
    assert scheduler.next_batch() is None, "no request is left for another step"
    answer(scheduler, second)
    assert scheduler.pages.num_free == scheduler.pages.num_total
    assert client.events == []


def test_a_failed_step_fails_its_rows_once_and_not_those_that_joined() -> None:
    scheduler = make()
    key, failing = joined(scheduler, request())
    first = launched(scheduler)
    _, other = joined(scheduler, request(max_tokens=3))
    second = launched(scheduler)
    error = StepFailed("no")
    scheduler.on_result(first, StepResult(0, [], error))
    assert failing.events == [Failed(error)]
    answer(scheduler, second)
    assert failing.events == [Failed(error)], "what the step ahead drew for it is worth nothing"
    assert other.tokens == [106]
    scheduler.release(key)
    end(scheduler)


def test_a_missing_token_fails_its_request_alone() -> None:
    scheduler = make()
    key, failing = joined(scheduler, request())
    _, other = joined(scheduler, request())
    first, second = launched(scheduler), launched(scheduler)
    broken = SampledToken(0, problem="NaN", cause=ProblemCause.DEFECT)
    scheduler.on_result(first, StepResult(0, [broken, SampledToken(106)]))
    assert isinstance(failing.last, Failed)
    scheduler.release(key)
    end(scheduler, second)
    assert len(failing.events) == 1
    assert isinstance(other.last, Finished)


def test_an_expired_request_takes_no_step_ahead() -> None:
    scheduler = make()
    assert isinstance(scheduler.clock, ManualClock)
    late, client = joined(scheduler, request(), timeout_s=5.0)
    punctual, _ = joined(scheduler, request())
    first = launched(scheduler)
    scheduler.clock.advance(6.0)
    second = launched(scheduler)
    assert second.request_keys == (punctual,)
    answer(scheduler, first)
    assert client.tokens == [106], "what was computed is published"
    third = launched(scheduler)
    assert third.request_keys == (punctual,)
    assert isinstance(client.last, Failed)
    assert isinstance(client.last.error, DeadlineError)
    scheduler.release(late)
    end(scheduler, second, third)


def test_a_lost_stage_ends_requests_of_both_steps() -> None:
    scheduler = make()
    key, client = joined(scheduler, request())
    ended, _ = joined(scheduler, request())
    batches = [launched(scheduler), launched(scheduler)]
    scheduler.release(ended)
    error = PeerLostError("gone")
    scheduler.on_pipeline_lost(batches, error)
    assert client.events == [Failed(error)]
    scheduler.release(key)
    end(scheduler)


# The same bits, over real models.


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Recorded(Answer):
    """Cancels its request after some tokens, as its client would."""

    def __init__(self, pool: LocalPool, num_tokens: int) -> None:
        super().__init__()
        self.pool, self.num_tokens, self.key = pool, num_tokens, 0

    def emit(self, event: DecodeEntryEvent) -> None:
        super().emit(event)
        if len(self.tokens) == self.num_tokens and not self.done.is_set():
            self.done.set()
            self.pool.loop.post(lambda: self.pool.scheduler.release(self.key))


def arriving(pool: LocalPool, wanted: list[Request], cancelled: Request) -> list[Answer]:
    """Yield each request after the previous one has a token; another is cancelled after its
    third."""
    other = Recorded(pool, 3)

    def begin() -> None:
        other.key = pool.scheduler.submit_local(cancelled, other.emit)

    call(pool.loop, begin)
    answers = [pool.generate(wanted[:1])[0]]
    answers += pool.generate(wanted[1:])
    assert other.done.wait(60)
    return answers


MODELS = {
    "dense": (QWEN3, "bfloat16"),
    "windows": (GEMMA3, "float32"),
    "latent": (DEEPSEEK_V3, "float32"),
    "recurrent": (HYBRID, "float32"),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_step_ahead_changes_no_bit(model: str) -> None:
    """Greedy and sampled, with logprobs; stops in mid-output; pages that run out; some with
    penalties, which wait."""
    description = tiny(*MODELS[model])
    plain = [each for each in requests(10) if not each.needs_output]
    with local_pool(description) as pool:
        expected = shown(pool.generate([*plain, requests(10)[3]]))
    stops = [
        replace(each, stop_token_ids=frozenset({tokens[5].token_id}))  # type: ignore[attr-defined]
        for each, tokens in zip(plain, expected, strict=False)
    ]
    with local_pool(description, steps_ahead=True, num_pages=26) as pool:
        answers = pool.generate(plain)
        assert shown(answers) == expected[:-1]
        assert shown(pool.generate([*plain, requests(10)[3]])) == expected
        for stopped, whole in zip(shown(arriving(pool, stops, plain[0])), expected, strict=False):
            assert stopped == whole[: len(stopped)]
            assert 0 < len(stopped) <= 6
        pool.generate(plain[:1])  # it ends by its length, with no step after it
        call(pool.loop, pool.scheduler.on_idle)
        assert pool.scheduler.pages.num_free == pool.scheduler.pages.num_total
