"""One client's grammar costs that client: too large, too slow or too hungry, it is refused by name,
and it alone."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from llguidance import LLTokenizer

from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from runtime.grammar import Grammar, GrammarKind, Grammars, children, load_grammars, process, turns
from runtime.grammar.children import GrammarChild
from runtime.grammar.language import check_shape, shown
from runtime.grammar.library import compiled
from tests.support.models.grammars import LONG_S, allowed_after
from tests.support.models.guided import EOS, spelled, write_character_tokenizer
from tests.support.models.hostile_grammars import never_compiled, regex, schema, slow_to_follow

SECRET = "customer-name-"


@pytest.fixture
def grammars(tmp_path: Path) -> Iterator[Grammars]:
    write_character_tokenizer(tmp_path)
    loaded = load_grammars(tmp_path, (EOS,))
    assert loaded is not None
    yield loaded
    loaded.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen waiting timeouts, which a busy core reaches before those of computing. Tests of them
    set their own."""
    monkeypatch.setattr(process, "ANSWER_S", LONG_S)
    monkeypatch.setattr(process, "COMPILE_WALL_S", LONG_S)
    monkeypatch.setattr(turns, "WAIT_S", LONG_S)


@pytest.fixture
def ample_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the memory limit, which a fast core reaches before the time limit."""
    monkeypatch.setattr(process, "MEMORY_BYTES", 1 << 30)


@pytest.mark.usefixtures("ample_memory")
async def test_a_schema_that_compiles_too_long_is_refused_and_remembered(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(LONG_S):
        with pytest.raises(
            InvalidRequestError, match="could not be compiled within 1 s of computing, the limit"
        ):
            await grammars.check(never_compiled())
    monkeypatch.setattr(grammars._fork_server, "fork", lambda: pytest.fail("compiled again"))
    with pytest.raises(InvalidRequestError, match="could not be compiled"):
        await grammars.check(never_compiled())


@pytest.mark.usefixtures("ample_memory")
async def test_while_many_of_them_come_others_are_compiled(grammars: Grammars) -> None:
    hostile = [
        asyncio.create_task(grammars.check(never_compiled(str(number)))) for number in range(12)
    ]
    async with asyncio.timeout(4 * LONG_S):
        await asyncio.gather(
            *(grammars.check(regex(f"[a-z]{{{number}}}")) for number in range(1, 9))
        )
        assert not all(task.done() for task in hostile), "they blocked no other"
        ends = await asyncio.gather(*hostile, return_exceptions=True)
    assert {type(end) for end in ends} <= {process.TooSlow, CapacityError}, ends
    assert any(isinstance(end, process.TooSlow) for end in ends)


async def test_the_same_new_grammar_is_compiled_once_for_all_callers(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks, fork = list[children.GrammarChild](), grammars._fork_server.fork

    def counted() -> children.GrammarChild:
        forks.append(fork())
        return forks[-1]

    monkeypatch.setattr(grammars._fork_server, "fork", counted)
    await asyncio.gather(*(grammars.check(regex("[a-z]+")) for _ in range(20)))
    assert len(forks) == 1


async def test_no_client_waits_for_the_turn_of_another_one_with_the_same_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has brought too many, and waits before its next one is compiled."""
    monkeypatch.setattr(turns, "BURST", 1)
    monkeypatch.setattr(turns, "WAIT_S", 1000.0)
    monkeypatch.setattr(grammars._allowances, "_per_s", 0.01)
    await grammars.check(regex("a"), "greedy")
    waiting = asyncio.create_task(grammars.check(regex("b"), "greedy"))
    await asyncio.sleep(0)
    async with asyncio.timeout(LONG_S / 2):
        await grammars.check(regex("b"), "other")
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_process_that_a_text_follows_is_not_replaced_by_a_later_check(
    grammars: Grammars,
) -> None:
    """The grammar was evicted: a row opens it while the next request has it checked again."""
    checking = asyncio.create_task(grammars.check(regex("ab")))
    await asyncio.sleep(0)
    assert grammars._checks, "it has begun"
    text = grammars.open(regex("ab"))
    grammars._processes[regex("ab")].compiled.result(LONG_S)
    await checking
    assert np.flatnonzero(allowed_after(text, 0, ())).tolist() == [ord("a")]
    text.close()


async def test_new_grammars_are_counted_by_the_client_that_brings_them(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "BURST", 2)
    monkeypatch.setattr(turns, "WAIT_S", 10.0)
    monkeypatch.setattr(grammars._allowances, "_per_s", 0.01)
    for number in range(2):
        await grammars.check(regex(f"a{number}"), "a")
    with pytest.raises(CapacityError, match="may bring 2 new grammars at once"):
        await grammars.check(regex("one more"), "a")
    await grammars.check(regex("a0"), "a")
    await grammars.check(regex("one more"), "b")


async def test_compilations_beyond_the_queue_limit_are_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars._first.turns, "_max_waiting", 3)
    ends = await asyncio.gather(
        *(grammars.check(regex(f"a{{{n + 1}}}")) for n in range(12)), return_exceptions=True
    )
    refused = [end for end in ends if end is not None]
    assert len(refused) == 12 - 4 - 3
    assert all(isinstance(end, CapacityError) and "3 grammars wait" in str(end) for end in refused)


NESTED: dict[str, object] = {"type": "integer"}
for _ in range(70):
    NESTED = {"items": NESTED}
TOO_LARGE = [
    (regex("a" * 20_000), "20000 bytes, the limit of an expression is 16384"),
    (schema({"pattern": "a" * 20_000}), "pattern has 20000 bytes"),
    (schema({"title": "x" * 70_000}), "bytes, the limit is 65536"),
    (schema(NESTED), "nested 71 deep, the limit is 64"),
    (
        schema({"properties": {f"p{n}": {} for n in range(2001)}}),
        "2001 properties, the limit is 2000",
    ),
    (schema({"enum": [1] * 20_001}), "values, the limit is 20000"),
    (schema({"maxItems": 10**7}), "maxItems must be at most 1000000"),
    (regex("((a{100}b){100}){100}"), "repeats something 1000000 times, the limit is 10000"),
    (regex("a{0,99999}"), "repeats something 99999 times"),
    (regex("a{" + "9" * 5000 + "}"), "repeats something"),
    (
        schema({"properties": {"x": {"pattern": "(a{200}){200}"}}}),
        "pattern repeats something 40000 times",
    ),
    (
        schema({"uniqueItems": True, "x-guidance": {"lenient": True}}),
        "x-guidance may have whitespace_flexible",
    ),
    (
        schema({"oneOf": [{}, {}], "x-guidance": {"coerce_one_of": True}}),
        "true or false, and nothing else",
    ),
    (
        schema({"x-guidance": {"whitespace_flexible": False, "item_separator": "x"}}),
        "true or false, and nothing",
    ),
    (
        schema({"x-guidance": {"whitespace_pattern": "((a{100}b){100}){100}"}}),
        "true or false, and nothing else",
    ),
    (schema({"x-guidance": {"whitespace_flexible": "no"}}), "true or false, and nothing else"),
    (schema({"x-guidance": 5}), "true or false, and nothing else"),
]


@pytest.mark.parametrize(
    ("grammar", "problem"), TOO_LARGE, ids=[problem for _, problem in TOO_LARGE]
)
async def test_size_and_shape_are_refused_before_anything_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, problem: str
) -> None:
    def fork() -> GrammarChild:  # on a thread, for which pytest.fail does nothing
        raise AssertionError("compiled")

    monkeypatch.setattr(grammars._fork_server, "fork", fork)
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        await grammars.check(grammar)
    assert refused.value.violations[0].field == grammar.field


@pytest.mark.parametrize(
    "lenient",
    [
        {"uniqueItems": True, "x-guidance": {"lenient": True}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}},
    ],
)
def test_no_grammar_process_ignores_unsupported_keywords(
    tmp_path: Path, lenient: dict[str, object]
) -> None:
    """Also where nothing was looked at before."""
    write_character_tokenizer(tmp_path)
    tokenizer = LLTokenizer(str(tmp_path / "tokenizer.json"), eos_token=[EOS])
    with pytest.raises(
        InvalidRequestError, match=r"uniqueItems|oneOf constraints are not supported$"
    ):
        compiled(tokenizer, schema(lenient))


@pytest.mark.parametrize(
    "text", ["a{99}b{99}c{99}", "(a|b{50}){99}", r"\{99999}", "[{99999}]", "(a{10}b){10}x{500}"]
)
def test_repetitions_that_do_not_nest_do_not_multiply(text: str) -> None:
    check_shape(regex(text))


async def test_a_grammar_that_needs_too_much_memory_is_refused_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grammars.check(regex("a"))
    monkeypatch.setattr(process, "MEMORY_BYTES", 1 << 20)
    huge = schema({"enum": [f"{number:0>24}" for number in range(2000)]})
    with pytest.raises(InvalidRequestError, match="it needs more than 1 MiB, or ends the compiler"):
        await grammars.check(huge)
    monkeypatch.undo()
    await grammars.check(regex("b"))


@pytest.mark.parametrize(("cpu_limit_s", "is_slow"), [(0.2, True), (60.0, False)])
def test_a_compilation_just_within_the_limit_was_too_slow(
    cpu_limit_s: float, *, is_slow: bool
) -> None:
    """It is tried once more with more time; what ends the compiler sooner is refused for good."""

    class Dying:
        def send(self, data: bytes, timeout_s: float) -> None: ...

        def close(self) -> None: ...

        def receive(self, timeout_s: float) -> bytes:
            time.sleep(0.2 - process.TICKS_S / 2)
            raise ConnectionResetError

    fork_server = cast(children.GrammarForkServer, SimpleNamespace(fork=Dying))
    ended = process.GrammarProcess(
        fork_server, regex("a"), cpu_limit_s, stays=False
    ).compiled.exception(LONG_S)
    assert isinstance(ended, InvalidRequestError)
    assert isinstance(ended, process.TooSlow) is is_slow


async def test_no_text_of_a_grammar_reaches_an_error_or_a_log_at_length(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    """The library quotes what it does not like; a client could forge log lines with it, or fill
    them."""
    marks = SECRET + "\n\x1b[31mERROR " + "x" * 5000
    for grammar in (
        regex(f"[{marks}"),
        regex(f"{marks}(?=a)"),
        schema({"type": marks}),
        schema({marks: {"not": {}}}),
        schema({"$ref": f"#/{marks}"}),
        schema({"pattern": f"({marks}"}),
        Grammar.of(GrammarKind.JSON_SCHEMA, marks),
        schema(
            {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}x{marks}*$"} for n in range(20)]}
        ),
    ):
        try:
            await grammars.check(grammar)
        except InvalidRequestError as error:
            text = error.violations[0].description
            assert len(text) < 400
            assert text.isprintable()
        assert SECRET not in repr(grammar)
    assert SECRET not in caplog.text
    assert shown("a\nb\x1b" + "c" * 200, 12) == "a\\nb\\x1bcccc…"


@pytest.mark.parametrize(
    ("computed_s", "says"),
    [
        (0.0, f"too busy to compute the next token of a grammar within {LONG_S:g} s"),
        (0.9, f"could not be computed within {LONG_S:g} s, the limit"),
    ],
)
async def test_a_hanging_mask_fails_alone_and_its_grammar_continues(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, computed_s: float, says: str
) -> None:
    """The process is stopped from outside, as a machine does that has too much to do, or a mask
    never comes."""
    grammar = regex("a*b[12]+")
    await grammars.check(grammar)
    hangs, goes_on = grammars.open(grammar), grammars.open(grammar)
    before = allowed_after(goes_on, 0, spelled("aab"))
    child = grammars._processes[grammar]._child
    assert child is not None
    receive, before_s = child.receive, child.cpu_s()

    def hurried(timeout_s: float) -> bytes:
        monkeypatch.setattr(child, "cpu_s", lambda: before_s + computed_s)
        monkeypatch.setattr(
            process, "ANSWER_S", LONG_S
        )  # not for the next one, which a busy machine may hold up
        return receive(timeout_s)

    monkeypatch.setattr(child, "receive", hurried)
    monkeypatch.setattr(process, "ANSWER_S", 0.3)
    signal.pidfd_send_signal(child._pidfd, signal.SIGSTOP)
    job, next_job = hangs.ask(0, ()), goes_on.ask(3, spelled("1"))
    assert job.wait(time.monotonic() + LONG_S)
    assert says in job.problem
    assert job.is_stalled == (computed_s == 0)
    assert next_job.wait(time.monotonic() + LONG_S)
    assert next_job.problem == ""
    assert (allowed_after(goes_on, 3, ()) == before).all(), "a new process knows what the text was"


def test_the_cpu_time_of_a_process_is_read_from_outside() -> None:
    ours, theirs = socket.socketpair()
    child = GrammarChild(ours, os.pidfd_open(os.getpid()))
    before_s, began_s = child.cpu_s(), time.process_time()
    while time.process_time() < began_s + 0.2:
        pass
    assert 0.1 < child.cpu_s() - before_s < time.process_time() - began_s + 0.1
    child.kill = lambda: None  # type: ignore[method-assign]  # it is this process
    child.close()
    theirs.close()
    assert child.cpu_s() == 0


async def test_a_text_that_takes_too_much_computing_fails_by_its_budget_alone(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a mask is the process's own CPU time, independent of other load on the
    machine."""
    monkeypatch.setattr(process, "BURST_CPU_S", 0.002)
    monkeypatch.setattr(process, "TOKEN_CPU_S", 0.0002)
    slow = slow_to_follow()
    await grammars.check(slow)
    await grammars.check(regex("[a-z]+"))
    text, other = grammars.open(slow), grammars.open(regex("[a-z]+"))

    def follow_on() -> None:
        for length in range(200):
            allowed_after(text, max(0, length - 1), spelled("[")[:length])

    with pytest.raises(
        InvalidRequestError, match=r"more computing than the limit of 0\.002 s at once and 0\.2 ms"
    ):
        follow_on()
    monkeypatch.undo()
    allowed_after(other, 0, spelled("abc"))


async def test_a_process_that_was_killed_is_replaced(grammars: Grammars) -> None:
    await grammars.check(regex("a+b"))
    text = grammars.open(regex("a+b"))
    allowed_after(text, 0, spelled("aa"))
    fork_server = grammars._fork_server._process
    assert fork_server is not None
    fork_server.kill()
    fork_server.wait()
    job = text.ask(2, ())  # its process ended with the fork server: this token fails by name
    assert job.wait(time.monotonic() + LONG_S)
    await grammars.check(regex("c"))
    assert allowed_after(text, 2, ()).nonzero()[0].tolist() == [ord("a"), ord("b")]


async def test_closing_ends_compilations_and_every_process(grammars: Grammars) -> None:
    compiling = asyncio.create_task(grammars.check(never_compiled()))
    await grammars.check(regex("a"))
    fork_server = grammars._fork_server._process
    assert fork_server is not None
    forked = descendants(fork_server.pid)
    assert forked
    grammars.close()
    async with asyncio.timeout(LONG_S):
        with pytest.raises((InvalidRequestError, UnavailableError)):
            await compiling
        while any(alive(pid) for pid in (fork_server.pid, *forked)):  # noqa: ASYNC110 - a process's end has no event here
            await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError):
            await grammars.check(regex("b"))


OWNER = """
import asyncio, sys
from pathlib import Path
from runtime.grammar import load_grammars
from tests.support.models.hostile_grammars import never_compiled, regex

async def main():
    grammars = load_grammars(Path(sys.argv[1]), (2,))
    await grammars.check(regex("a"))
    print(grammars._fork_server._process.pid, flush=True)
    await grammars.check(never_compiled())

asyncio.run(main())
"""


def test_an_owner_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        fork_server = int(owner.stdout.readline())
        forked = descendants(fork_server)
        owner.kill()
    deadline_s = time.monotonic() + LONG_S
    while any(alive(pid) for pid in (fork_server, *forked)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
