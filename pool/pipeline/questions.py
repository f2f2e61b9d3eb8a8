"""Questions of a leader to the other processes of its pool, and their answers."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from runtime.errors import BatonError, UnavailableError

AnswerT = TypeVar("AnswerT")


class StageQuestions(Generic[AnswerT]):
    """The open questions of one kind, by number. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[int, asyncio.Future[AnswerT]]] = {}  # with the asked rank

    async def ask(
        self, rank: int, send: Callable[[int], object], *, timeout_s: float, what: str
    ) -> AnswerT:
        """Ask a process by `send(number)`, and return its answer.

        `what` completes "it has not ..." for a process that does not answer in time.

        Raises:
            UnavailableError: the process was lost, or does not answer.
        """
        number = next(self._numbers)
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._open[number] = rank, answer
        try:
            async with asyncio.timeout(timeout_s):
                send(number)
                return await answer
        except TimeoutError:
            raise UnavailableError(
                f"process {rank} of the pool has not {what} within {timeout_s:g} s"
            ) from None
        finally:
            del self._open[number]

    def answered(self, rank: int, number: int, answer: AnswerT) -> None:
        """Take an answer; one that is not expected any more has no effect."""
        asked, waiting = self._open.get(number, (None, None))
        if waiting is not None and asked == rank and not waiting.done():
            waiting.set_result(answer)

    def stage_lost(self, rank: int, error: BatonError) -> None:
        """Fail the questions to a lost process."""
        for asked, waiting in self._open.values():
            if asked == rank and not waiting.done():
                waiting.set_exception(error.again())
