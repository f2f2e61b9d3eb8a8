"""Moves of blocks between the memory of a pool's processes and their tiers."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from pool.tiers.block_store import Tier
from pool.tiers.stage_blocks import BlockMove, StageBlocks
from protos import pipeline_pb2 as pb
from runtime.digests import NAME_BYTES
from runtime.errors import BatonError, IntegrityError

logger = logging.getLogger(__name__)


async def move_blocks(own: StageBlocks, move: BlockMove) -> int:
    """Move blocks of this process; return how many of the first ones were intact.

    It always waits for the end, because the thread may use their memory until then.
    """
    executor = own.reading if move.load else own.writing
    return await own.run(executor, partial(own.move, move))


async def settle(tiers: Mapping[Tier, StageBlocks]) -> None:
    """Wait until a process has ended all moves that began before."""
    events = asyncio.get_running_loop()
    for own in tiers.values():
        for executor in (own.reading, own.writing):
            await events.run_in_executor(executor, lambda: None)


async def answer_blocks(
    tiers: Mapping[Tier, StageBlocks], command: pb.JoinResponse
) -> pb.BlocksMoved:
    """Carry out a command of the leader to move or to find blocks; return the answer."""
    if command.HasField("find_blocks"):
        return await _answer_find(tiers, command.find_blocks)
    return await _answer_move(tiers, command.move_blocks)


async def _answer_move(tiers: Mapping[Tier, StageBlocks], command: pb.MoveBlocks) -> pb.BlocksMoved:
    answer = pb.BlocksMoved(number=command.number)
    try:
        move = move_from_proto(command)
        own = tiers.get(move.tier)
        if own is not None:
            answer.num_blocks = await move_blocks(own, move)
    except BatonError as error:
        logger.error("blocks were not moved: %s", error)
    return answer


async def find_blocks(own: StageBlocks, names: Sequence[bytes], *, with_state: bool) -> int:
    """Return what `StageBlocks.num_known` does."""
    return await own.run(own.reading, lambda: own.num_known(names, with_state=with_state))


async def _answer_find(
    tiers: Mapping[Tier, StageBlocks], question: pb.FindBlocks
) -> pb.BlocksMoved:
    answer = pb.BlocksMoved(number=question.number)
    own = next((own for tier, own in tiers.items() if tier == question.tier), None)
    if own is not None and all(len(name) == NAME_BYTES for name in question.names):
        answer.num_blocks = await find_blocks(own, question.names, with_state=question.with_state)
    return answer


def move_to_proto(number: int, move: BlockMove) -> pb.MoveBlocks:
    return pb.MoveBlocks(
        number=number,
        tier=move.tier,
        load=move.load,
        names=move.names,
        page_ids=move.page_ids,
        slot_id=move.slot_id,
        state_of=move.state_of,
    )


def move_from_proto(command: pb.MoveBlocks) -> BlockMove:
    """Return the blocks of a command.

    Raises:
        IntegrityError: their numbers of names and pages differ, a name is none, or the tier is none.
    """
    names = tuple(command.names)
    every = (*names, command.state_of) if command.slot_id else names
    if len(names) != len(command.page_ids) or any(len(name) != NAME_BYTES for name in every):
        raise IntegrityError(
            f"{len(names)} names of blocks for {len(command.page_ids)} pages, each of {NAME_BYTES} bytes"
        )
    if command.tier not in {*Tier}:
        raise IntegrityError(f"there is no tier {command.tier!r}")
    return BlockMove(
        Tier(command.tier),
        load=command.load,
        names=names,
        page_ids=tuple(command.page_ids),
        slot_id=command.slot_id,
        state_of=command.state_of,
    )
