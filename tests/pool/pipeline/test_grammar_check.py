"""The last stage compiles grammars of a pool; its leader requests a check and gets the reason of a
refusal."""

import asyncio
from typing import cast

import pytest

from engine.core.layer_range import Placement
from models.weights_digest import StageDigests
from pool.pipeline.group import StageGroup
from pool.pipeline.membership import StageLink
from pool.pipeline.session_reports import SessionReports
from protos import pipeline_pb2 as pb
from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from runtime.grammar import Grammar, GrammarKind
from transfer.agent.agent import TransferAgent
from transfer.plan.handoff_terms import StageEndpoint

WORD = Grammar.of(GrammarKind.REGEX, "[a-z]+")


def formed() -> tuple[StageGroup, list[StageLink]]:
    """Form a pool of three."""
    group = StageGroup(
        cast(TransferAgent, None),
        [Placement(rank, 3) for rank in range(3)],
        SessionReports(asyncio.get_running_loop()),
    )
    links = [
        StageLink(rank, cast(StageEndpoint, None), b"", StageDigests("0" * 32)) for rank in (1, 2)
    ]
    group.pool_formed(links)
    return group, links


async def asked(link: StageLink) -> pb.CheckGrammar:
    response = await asyncio.wait_for(link.window.get(), 10)
    assert response is not None
    assert response.WhichOneof("command") == "check_grammar"
    return response.check_grammar


def answer(group: StageGroup, checked: pb.GrammarChecked) -> None:
    group.stage_answered(2, pb.JoinRequest(grammar_checked=checked))


async def test_the_last_stage_checks_and_its_result_is_returned() -> None:
    group, links = formed()
    checks = [asyncio.create_task(group.check(WORD)) for _ in range(3)]
    ids = [await asked(links[-1]) for _ in checks]
    assert links[0].window.empty()
    assert {found.grammar.regex for found in ids} == {WORD.text}
    answer(group, pb.GrammarChecked(check_id=ids[1].check_id, problem="no", refused=True))
    answer(group, pb.GrammarChecked(check_id=ids[0].check_id))
    answer(group, pb.GrammarChecked(check_id=ids[2].check_id, problem="busy"))
    answer(group, pb.GrammarChecked(check_id=999))
    await checks[0]
    with pytest.raises(InvalidRequestError, match=r"structured_output\.regex: no"):
        await checks[1]
    with pytest.raises(CapacityError, match="busy"):
        await checks[2]


async def test_a_check_ends_with_the_stage_that_was_asked() -> None:
    group, links = formed()
    check = asyncio.create_task(group.check(WORD))
    await asked(links[-1])
    group.stage_lost(2, "stage 2 of the pool died")
    with pytest.raises(UnavailableError, match="stage 2 of the pool died"):
        await check
    with pytest.raises(UnavailableError, match="missing"):
        await group.check(WORD)


async def test_a_stage_that_is_lost_before_it_is_asked_fails_the_check() -> None:
    """Between the call and the moment its parts run: the list of links is shorter then."""
    group, links = formed()
    check = asyncio.create_task(group.check(WORD))
    await asyncio.sleep(0)
    group.stage_lost(2, "stage 2 of the pool died")
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="stage"):
            await check
    assert all(link.window.empty() or link.rank == 2 for link in links)
