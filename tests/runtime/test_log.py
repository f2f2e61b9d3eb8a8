import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from contextvars import copy_context

import pytest

from runtime.clock import ManualClock
from runtime.errors import ConfigError
from runtime.observe.log import (
    MAX_MESSAGE_CHARACTERS,
    MAX_TRACEBACK_CHARACTERS,
    MAX_TRACEBACK_LINES,
    MAX_VALUE_CHARACTERS,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_S,
    LogStyle,
    bind,
    bound_ids,
    configure,
    message_of,
    rebind,
    report_end,
    shown,
    styled_line,
)
from runtime.observe.tracing import NoopSpan, current
from runtime.rpc import calls

FORGED = "x\n12:00:00.000 error   forged\r\x1b[31m\u2028\x85end"
STYLES = list(LogStyle)


@pytest.fixture(autouse=True)
def restored_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers = root.handlers[:]
    names = (None, "grpc", "grpc._cython.cygrpc", "numba", "httpx2")
    levels = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    yield
    root.handlers[:] = handlers
    for logger, level in levels:
        logger.setLevel(level)
    logging.captureWarnings(capture=False)


def test_a_flood_of_refused_calls_makes_a_bounded_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = ManualClock(), io.StringIO()
    monkeypatch.setattr("runtime.observe.log.time.monotonic", clock.now)
    configure(level="info", style=LogStyle.JSON, role="router", stream=stream)
    refusals, others = logging.getLogger("runtime.rpc.calls"), logging.getLogger("others")
    for _ in range(1000):
        refusals.info("call rejected or failed: %s", "no token")
        others.info("request ended")
    clock.advance(1.0)
    for _ in range(1000):
        refusals.info("call rejected or failed: %s", "no token")
    refusals.info("call rejected for %s", "priority")
    lines = list(map(json.loads, stream.getvalue().splitlines()))
    told = [line for line in lines if line["message"] == "call rejected or failed: no token"]
    assert len(told) == REFUSALS_AT_ONCE + REFUSALS_PER_S
    assert [line["omitted"] for line in told if "omitted" in line] == [1000 - REFUSALS_AT_ONCE]
    assert sum(line["message"] == "request ended" for line in lines) == 1000
    assert lines[-1]["message"] == "call rejected for priority"


def test_the_limit_of_lines_is_that_of_the_module_that_logs_refused_calls() -> None:
    assert calls.__name__ == "runtime.rpc.calls"


def test_json_lines_carry_ids_and_fields() -> None:
    stream = io.StringIO()
    configure(level="info", style=LogStyle.JSON, role="decode", stream=stream)
    with bind(request_id="r1"), bind(session_id="s1"):
        logging.getLogger("x").info("took %d", 3, extra={"pages": 4})
    logging.getLogger("x").debug("not shown")
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "role": "decode",
        "logger": "x",
        "message": "took 3",
        "request_id": "r1",
        "session_id": "s1",
        "pages": 4,
    }
    assert not bound_ids()


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("error", 0)])
def test_debug_omits_the_traces_of_libraries(level: str, lines: int) -> None:
    stream = io.StringIO()
    configure(level=level, style=LogStyle.HUMAN, role="decode", stream=stream)
    logging.getLogger("numba.core.byteflow").debug("dispatch pc=0")
    logging.getLogger("httpx2").info("HTTP Request: GET /apis")
    logging.getLogger("numba.core").info("what is rare")
    logging.getLogger("decode").debug("ours")
    assert len(stream.getvalue().splitlines()) == lines


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        (f"00-{'4b' * 16}-{'0f' * 8}-01", {"trace_id": "4b" * 16, "span_id": "0f" * 8}),
        (f"01-{'4b' * 16}-{'0f' * 8}-01-later", {"trace_id": "4b" * 16, "span_id": "0f" * 8}),
        (f"00-{'4B' * 16}-{'0f' * 8}-01", {}),
        ("x\nforged", {}),
        ("", {}),
    ],
)
def test_lines_of_a_traced_call_have_its_ids(parent: str, expected: dict[str, str]) -> None:
    stream = io.StringIO()
    configure(level="info", style=LogStyle.JSON, role="decode", stream=stream)
    with current(NoopSpan((("traceparent", parent),))):
        logging.getLogger("x").info("inside")
    logging.getLogger("x").info("outside")
    inside, outside = map(json.loads, stream.getvalue().splitlines())
    assert {key: inside[key] for key in ("trace_id", "span_id") if key in inside} == expected
    assert "trace_id" not in outside


def test_human_lines_show_the_traceback() -> None:
    stream = io.StringIO()
    configure(level="info", style=LogStyle.HUMAN, role="decode", stream=stream)
    logging.getLogger("x").error("broke", exc_info=ValueError("why"), extra={"pages": 4})
    assert "error   broke  pages=4" in stream.getvalue()
    assert "ValueError: why" in stream.getvalue()


async def test_ids_belong_to_one_task() -> None:
    async def handler(request_id: str) -> str:
        rebind(request_id=request_id)
        await asyncio.sleep(0)
        return bound_ids()["request_id"]

    assert list(await asyncio.gather(handler("a"), handler("b"))) == ["a", "b"]


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log level"):
        configure(level="loud", style=LogStyle.JSON, role="x")


def logged(style: LogStyle, log: Callable[[logging.Logger], None]) -> str:
    stream = io.StringIO()
    configure(level="info", style=style, role="router", stream=stream)
    copy_context().run(log, logging.getLogger("x"))
    return stream.getvalue()


@pytest.mark.parametrize("style", STYLES)
def test_no_value_makes_a_second_line_or_reaches_a_terminal(style: LogStyle) -> None:
    def log(logger: logging.Logger) -> None:
        with bind(request_id=FORGED):
            logger.info(
                "call of %s refused",
                FORGED,
                extra={"reason": FORGED, "several": [FORGED], "last": 1},
            )

    text = logged(style, log)
    assert len(text.splitlines()) == 1, (
        "splitlines knows every character that any reader takes for the end of a line"
    )
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    assert text.count("forged") == 4, "shown, but in its place"


@pytest.mark.parametrize("style", STYLES)
def test_a_megabyte_of_anything_makes_a_short_line(style: LogStyle) -> None:
    long = "x" * (8 << 20)

    def log(logger: logging.Logger) -> None:
        rebind(request_id=long)
        logger.info("call of %s refused for %d s: %s", long, 3, "why", extra={"reason": long})
        logger.info(long)
        assert len(bound_ids()["request_id"]) == MAX_VALUE_CHARACTERS, (
            "what is kept while the request runs"
        )

    text = logged(style, log)
    assert len(text) < 3 * (MAX_VALUE_CHARACTERS + 100) + MAX_MESSAGE_CHARACTERS + 1000
    assert "for 3 s: why" in text, "a long argument hides no other"
    assert f"({8 << 20} characters)" in text


@pytest.mark.parametrize("style", STYLES)
def test_a_traceback_is_bounded_and_indented(style: LogStyle) -> None:
    def log(logger: logging.Logger) -> None:
        error = ValueError(FORGED + "\n" + "y" * (8 << 20) + "\n" * 10_000 + "the end")
        logger.error("broke", exc_info=error)

    text = logged(style, log)
    assert len(text) < MAX_TRACEBACK_LINES * (MAX_TRACEBACK_CHARACTERS + 100)
    assert "the end" in text
    lines = (
        text.splitlines() if style is LogStyle.HUMAN else json.loads(text)["exception"].splitlines()
    )
    assert all(line.startswith("    ") for line in lines[style is LogStyle.HUMAN :])


def test_a_value_cannot_pose_as_another_field() -> None:
    def log(logger: logging.Logger) -> None:
        logger.info("said", extra={"reason": "none code=OK", "time_s": 1})

    assert logged(LogStyle.HUMAN, log).endswith(' said  reason="none code=OK" time_s=1\n')
    line = json.loads(
        logged(LogStyle.JSON, lambda logger: logger.info("said", extra={"level": "debug"}))
    )
    assert line["level"] == "info"


def test_printable_text_is_shown_unchanged() -> None:
    assert shown("grüße 你好") == "grüße 你好"
    assert shown("a\tb\\") == "a\\tb\\"
    assert shown("abc", 2) == "ab... (3 characters)"
    assert shown("\udc80") == "\\udc80"


@pytest.mark.parametrize("style", STYLES)
def test_the_reason_a_process_ends_is_in_the_style_of_its_logs(
    style: LogStyle, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    configure(level="error", style=style, role="router", stream=stream)
    report_end("router: 100% of it is wrong")
    if style is LogStyle.HUMAN:
        assert (capsys.readouterr().err, stream.getvalue()) == ("router: 100% of it is wrong\n", "")
    else:
        line = json.loads(stream.getvalue())
        assert (line["level"], line["role"], line["message"]) == (
            "error",
            "router",
            "router: 100% of it is wrong",
        )


def test_a_line_without_a_logger_is_like_one_with_it() -> None:
    line = json.loads(styled_line(LogStyle.JSON, "starting", role="baton"))
    logged_line = json.loads(logged(LogStyle.JSON, lambda logger: logger.info("starting")))
    assert {**logged_line, "role": "baton", "time": ""} == {
        **line,
        "logger": logged_line["logger"],
        "time": "",
    }
    assert len(line["time"]) == len(logged_line["time"])
    assert message_of(json.dumps(line)) == "starting"


@pytest.mark.parametrize(
    "line", ["router: no such folder", "[1]", "{}", '{"message": 1}', "{", "null", "\ud800"]
)
def test_a_line_that_is_no_record_is_its_own_message(line: str) -> None:
    assert message_of(line) == line
