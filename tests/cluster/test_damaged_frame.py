"""One bit flipped in a frame between two stages of a real pool: no wrong token, and the pool serves
again by itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.fork_server import Here
from baton.values import Completion
from runtime.errors import BatonError, PeerLostError, UnavailableError
from tests.cluster.test_death import timed
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference


@dataclass(frozen=True)
class WithFlipping(Here):
    """A cluster with one process that flips a bit of its `frame`-th frame."""

    victim: str
    frame: int
    bit: int

    def program(
        self, name: str, module: str, arguments: Sequence[str]
    ) -> tuple[str, Sequence[str]]:
        if name != self.victim:
            return module, arguments
        return "tests.support.pool.flipping_worker", (str(self.frame), str(self.bit), *arguments)


@pytest.mark.parametrize(
    ("victim", "bit"),
    [("decode-0.0", 8 * 200 + 5), ("decode-0.1", 8 * 40 + 1)],
    ids=["a batch", "a result"],
)
async def test_a_flipped_bit_between_stages_breaks_the_pool_and_no_response(
    checkpoint: Path, reference: Reference, victim: str, bit: int
) -> None:
    questions = make_questions(8, seed=31, max_tokens=60)
    expected = on_the_wire(reference.answers(questions))
    async with running_cluster(
        checkpoint, decode_pp=2, places=WithFlipping(victim, 40, bit)
    ) as running:
        pids = {name: process.pid for name, process in running.cluster.processes.items()}
        first = [
            result
            for result, _ in await asyncio.gather(*(timed(running, each) for each in questions))
        ]
        for result, right in zip(first, expected, strict=True):
            if isinstance(result, BatonError):
                assert isinstance(result, PeerLostError | UnavailableError), "it may be sent again"
            else:
                assert shown(result) == right
        assert any(
            "what arrived is not what was sent (authenticator)" in line for line in running.lines
        ), "flipped"
        assert not [
            line for line in running.lines if "Unexpected" in line or "never retrieved" in line
        ]
        await running.cluster.wait_serving(timeout_s=60)
        again = [
            result
            for result, _ in await asyncio.gather(*(timed(running, each) for each in questions))
        ]
        assert [
            shown(result) if isinstance(result, Completion) else result for result in again
        ] == expected
        await running.until_clean()
        assert {name: process.pid for name, process in running.cluster.processes.items()} == pids, (
            "all went on"
        )
