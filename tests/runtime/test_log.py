import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from runtime.errors import ConfigError
from runtime.log import LogStyle, bind, bound_ids, configure, rebind


@pytest.fixture(autouse=True)
def restored_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_json_lines_carry_ids_and_fields() -> None:
    stream = io.StringIO()
    configure(level="info", style=LogStyle.JSON, role="decode", stream=stream)
    with bind(request_id="r1"), bind(session_id="s1"):
        logging.getLogger("x").info("took %d", 3, extra={"pages": 4})
    logging.getLogger("x").debug("not shown")
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {"level": "info", "role": "decode", "logger": "x", "message": "took 3", "request_id": "r1",
                    "session_id": "s1", "pages": 4}
    assert not bound_ids()


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
