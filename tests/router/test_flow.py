"""One request through real streams: the order of events, every failure, every way to cancel."""

from tests.router.harness import running_router, token_request
from tests.support.fake_workers import Fabric, FakeDecode, FakePrefill, Journal, expected_tokens


async def test_a_request_goes_the_whole_way() -> None:
    fabric, journal = Fabric(), Journal()
    async with running_router(FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)) as router:
        answer = await router.ask(token_request([1, 2, 3], max_tokens=4))
        assert answer.token_ids == expected_tokens([1, 2, 3], 4)
        print(answer.finish, answer.text, journal.entries)
        await router.assert_nothing_left()
