"""Every line that the router logs of a request has its id: the client's, or the router's own."""

import logging

import pytest

from runtime.errors import InvalidRequestError
from runtime.observe.log import bound_ids
from tests.router.harness import running_router, token_request
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal


class Ids(logging.Handler):
    """A filter that records the bound fields that log formatters add to each line."""

    def __init__(self) -> None:
        super().__init__()
        self.of_refusals: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("call rejected"):
            self.of_refusals.append(bound_ids().get("request_id", ""))


async def test_a_refused_request_has_an_id_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    handler = Ids()
    logging.getLogger().addHandler(handler)
    try:
        fabric, journal = Fabric(), Journal()
        async with running_router(
            FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
        ) as router:
            for request_id in ("", "", "mine"):
                with pytest.raises(InvalidRequestError, match="max_tokens"):
                    await router.ask(token_request([1, 2], max_tokens=0, request_id=request_id))
    finally:
        logging.getLogger().removeHandler(handler)
    first, second, own = handler.of_refusals
    assert len(first) == len(second) == 32
    assert first != second
    assert own == "mine"
