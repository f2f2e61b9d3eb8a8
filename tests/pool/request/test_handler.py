"""Delivery of the engine's events."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pool.request import handler as module
from pool.request.handler import EventPost


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - lists have no event to wait for
            await asyncio.sleep(0.005)


async def test_events_of_a_step_arrive_at_once_and_an_error_blocks_none() -> None:
    loop, seen, errors = asyncio.get_running_loop(), list[object](), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failure = RuntimeError("of one request")

    def fail(event: object) -> None:
        raise failure

    post = EventPost(loop)
    for receive, event in ((seen.append, 1), (fail, 2), (seen.append, 3)):
        post.put(receive, event)
    post.flush()
    loop.call_soon(seen.append, "the loop's next callback")
    await until(lambda: len(seen) == 3)
    assert (seen, errors) == ([1, 3, "the loop's next callback"], [failure])


async def test_the_loop_runs_at_once_but_not_after_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(module, "_give_way", lambda: taken.append("way"))
    monkeypatch.setattr(module, "LET_IN_S", 60.0)
    post = EventPost(asyncio.get_running_loop())
    for event in ("first", "second"):
        post.put(taken.append, event)
        post.flush()
    assert taken == ["way"]
    await asyncio.sleep(0)
    monkeypatch.setattr(module, "LET_IN_S", 0.0)
    post.flush()  # nothing
    post.put(taken.append, "third")
    post.flush()
    assert taken == ["way", "first", "second", "way"]
    await asyncio.sleep(0)
    assert taken == ["way", "first", "second", "way", "third"]


async def test_deferrable_events_wake_the_loop_once_by_its_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, seen, calls = asyncio.get_running_loop(), list[object](), list[object]()
    timers = list[tuple[float, Callable[[], None]]]()
    post, wake = EventPost(loop), loop.call_soon_threadsafe

    def called(*args: Any) -> None:  # noqa: ANN401 - as the loop has it
        calls.append(args)
        wake(*args)

    def set_timer(delay: float, callback: Callable[[], None]) -> object:
        timers.append((delay, callback))
        return callback

    monkeypatch.setattr(loop, "call_soon_threadsafe", called)
    monkeypatch.setattr(loop, "call_later", set_timer)

    def step(event: object, *, can_wait: bool = True) -> None:
        post.put(seen.append, event, can_wait=can_wait)
        post.flush()

    def expire() -> None:
        delay, callback = timers.pop()
        assert (delay, timers) == (module.PACE_S, [])
        callback()

    step("first")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1), "the loop sleeps, so it is sent at once"
    step("second")
    step("third")
    await asyncio.sleep(0)
    assert (seen, len(calls)) == (["first"], 1)
    expire()
    assert (seen, len(calls)) == (["first", "second", "third"], 1)
    step("fourth")
    step("last", can_wait=False)
    await asyncio.sleep(0)
    assert (seen[3:], len(calls)) == (["fourth", "last"], 2), (
        "what must not wait takes along what came before"
    )
    expire()  # finds no event
    assert not timers
    step("after a pause")
    assert len(calls) == 3
    await asyncio.sleep(0)
    assert seen[5:] == ["after a pause"]


async def test_nothing_is_lost_between_a_thread_that_posts_and_the_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PACE_S", 0.0001)
    seen, post = list[object](), EventPost(asyncio.get_running_loop())

    def engine() -> None:
        for number in range(20_000):
            post.put(seen.append, number, can_wait=True)
            post.flush()

    await asyncio.to_thread(engine)
    await until(lambda: len(seen) == 20_000)
    assert seen == list(range(20_000))
