"""`baton chat` as a person uses it: in a terminal of its own, against an echo router."""

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import cast

import pexpect
import pytest
from pexpect.fdpexpect import fdspawn

from baton.chat_options import ChatOptions
from baton.client import BatonClient
from baton.conversation import Conversation
from baton.values import (
    ChatMessage,
    Chunk,
    Event,
    Finish,
    FinishReason,
    Query,
    Sampling,
    Stop,
    Timings,
    Usage,
)
from runtime.errors import FieldViolation, InvalidRequestError
from tests.support.router.generation import EchoGeneration, serve_echo

# The first terminal that the leader of a session opens is the one whose Ctrl-C interrupts it.
IN_TERMINAL = (
    "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
    "os.execv(sys.executable, [sys.executable, '-m', 'baton', *sys.argv[1:]])"
)
AT_PROMPT = "\x1b[?2004h"  # asks the terminal to mark what is pasted
PASTE, PASTED, ENTER = "\x1b[200~", "\x1b[201~", "\r"


class Person:
    """Types and reads. Every wait is on a thread: the echo answers on the test's own loop.

    The terminal is not made by forking this process, as pexpect would: gRPC's threads are in it."""

    def __init__(self, echo: EchoGeneration, address: str, *flags: str) -> None:
        self.echo = echo
        own, theirs = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "chat", "--target", address, *flags],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(theirs)
        self._terminal = fdspawn(own, encoding="utf-8", timeout=120)

    def type(self, keys: str) -> None:
        self._terminal.send(keys)

    def interrupt(self) -> None:
        self._terminal.send("\x03")

    async def reads(self, word: str) -> None:
        await asyncio.to_thread(self._terminal.expect_exact, word)

    async def leaves(self) -> int:
        await asyncio.to_thread(self._terminal.expect, pexpect.EOF)
        return await asyncio.to_thread(self._process.wait, 120)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(120)
        self._terminal.close()

    async def asked(self, count: int) -> list[list[str]]:
        """Return the messages of each request once there were `count` requests."""
        async with asyncio.timeout(120):
            while len(self.echo.requests) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return [
            [message.content for message in request.chat.messages] for request in self.echo.requests
        ]


@asynccontextmanager
async def conversation(*flags: str) -> AsyncIterator[Person]:
    echo = EchoGeneration()
    server, address = await serve_echo(echo)
    person = Person(echo, address, *flags)
    try:
        await person.reads("/help shows more")
        yield person
    finally:
        person.close()
        await server.drain(grace_s=0)


async def test_pasted_text_is_one_turn_and_commands_are_not_sent() -> None:
    async with conversation() as person:
        person.type(f"{PASTE}first line\nsecond line{PASTED}")
        person.type(ENTER)
        assert await person.asked(1) == [["first line\nsecond line"]]
        for command, answer in (
            ("/help", "/clear   forget"),
            ("/fly", "unknown command /fly"),
            ("/clear", "(forgotten)"),
        ):
            person.type(command + ENTER)
            await person.reads(answer)
        person.type("again" + ENTER)
        assert (await person.asked(2))[1:] == [["again"]]
        person.type("/exit" + ENTER)
        assert await person.leaves() == 0


async def test_a_line_can_be_edited_and_an_earlier_one_taken_again() -> None:
    left, up = "\x1b[D", "\x1b[A"
    async with conversation() as person:
        person.type("helo" + left + "l" + ENTER)
        assert await person.asked(1) == [["hello"]]
        await person.reads("hello ")
        person.type(up + ENTER)
        assert (await person.asked(2))[1][-1] == "hello"
        person.type("/exit" + ENTER)
        assert await person.leaves() == 0


async def test_an_interrupt_ends_the_response_and_not_the_conversation() -> None:
    async with conversation() as person:
        person.type("hang" + ENTER)
        async with asyncio.timeout(120):
            await person.echo.started.wait()
        person.interrupt()
        await person.reads("(stopped)")
        await person.reads(AT_PROMPT)
        person.type("/clear" + ENTER)  # the echo would stop at what is kept of this turn, too
        await person.reads("(forgotten)")
        person.type("go on" + ENTER)
        assert (await person.asked(2))[1][-1] == "go on"
        await person.reads("go on ")
        await person.reads(AT_PROMPT)
        person.interrupt()
        await person.reads("Ctrl-D or /exit ends")
        await person.reads(AT_PROMPT)  # between two prompts the terminal itself would take it
        person.type("\x04")
        assert await person.leaves() == 0


async def test_a_failed_response_does_not_end_the_conversation() -> None:
    async with conversation("--temperature", "-1") as person:
        for _ in range(2):
            person.type("hello" + ENTER)
            await person.reads("baton: sampling.temperature: must be from 0 to 100, got -1")
        assert await person.asked(2) == [["hello"], ["hello"]], "nothing of the first is kept"
        person.type("/exit" + ENTER)
        assert await person.leaves() == 0


class SmallContext:
    """A client whose server has room for four messages."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.sessions = set[str]()

    def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> Generator[Event, None, None]:
        self.seen.append(len(query.prompt))
        self.sessions.add(query.session_id)
        if len(query.prompt) > 4:
            raise InvalidRequestError(
                FieldViolation("chat", "has 90 tokens; the maximum context length of 64 is")
            )
        yield Chunk("r", (1,), "yes", (), Usage(1, 1))
        yield Finish("r", FinishReason.STOP, None, None, Usage(1, 1), Timings())


def test_a_full_context_forgets_the_oldest_turn(capsys: pytest.CaptureFixture[str]) -> None:
    client = SmallContext()
    talk = Conversation(
        cast(BatonClient, client), "be brief", ChatOptions(), Sampling(), Stop(), None
    )
    for question in ("one", "two", "three"):
        assert talk.answer(question) == "stop"
    assert client.seen == [2, 4, 6, 4], "the system message, and the turns that fit"
    assert talk.history[0] == ChatMessage("user", "two")
    assert len(client.sessions) == 1, "all turns are of one session"
    assert "" not in client.sessions
    assert capsys.readouterr().out.count("its oldest turn is dropped") == 1
