"""The adapters of all processes of a pool: the leader's commands, and what becomes of them."""

import asyncio

import pytest

from pool.pipeline.group import StageGroup
from pool.pipeline.membership import StageLink
from protos import pipeline_pb2 as pb
from runtime.errors import ConfigError, UnavailableError
from tests.pool.pipeline.test_grammar_check import formed


async def hold(group: StageGroup) -> None:
    """Have the other processes hold an adapter; this one takes none."""

    async def nothing(call: object) -> None: ...

    async with asyncio.timeout(10):
        await group.hold_adapters(None, [], nothing)


async def number_of(link: StageLink) -> int:
    response = await asyncio.wait_for(link.window.get(), 10)
    assert response is not None
    return response.hold_adapters.number


def answer(group: StageGroup, rank: int, number: int, problem: str = "") -> None:
    held = pb.AdaptersHeld(number=number, problem=problem)
    group.stage_answered(rank, pb.JoinRequest(adapters_held=held))


async def test_all_processes_answer_and_a_problem_names_its_own() -> None:
    group, links = formed()
    holding = asyncio.create_task(hold(group))
    first, second = [await number_of(link) for link in links]
    answer(group, 1, second)  # not the one that was asked
    answer(group, 1, 999)
    answer(group, 2, second, "no such file")
    await asyncio.sleep(0.01)
    assert not holding.done(), "the other one may still be loading"
    answer(group, 1, first)
    with pytest.raises(ConfigError, match="process 2 of the pool: no such file"):
        await holding


async def test_a_command_ends_with_the_process_that_has_it() -> None:
    group, links = formed()
    holding = asyncio.create_task(hold(group))
    first, _ = [await number_of(link) for link in links]
    answer(group, 1, first)
    group.stage_lost(2, "stage 2 of the pool died")
    with pytest.raises(UnavailableError, match="stage 2 of the pool died"):
        await holding


async def test_a_process_that_is_lost_before_its_command_delays_nothing() -> None:
    group, links = formed()
    holding = asyncio.create_task(hold(group))
    await asyncio.sleep(0)
    group.stage_lost(2, "stage 2 of the pool died")
    answer(group, 1, await number_of(links[0]))
    with pytest.raises(UnavailableError, match="lost"):
        await holding
