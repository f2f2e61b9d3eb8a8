"""Several choices of one request: one stream, one index each, derived seeds, one end."""

import asyncio

import grpc
import pytest

from protos import generation_pb2, types_pb2
from router.request.choices import SEED_STRIDE
from runtime.errors import InternalError
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)


def pair() -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("prefill", fabric, journal), FakeDecode("decode", fabric, journal)


async def by_index(
    router: RouterHarness,
    request: generation_pb2.GenerateRequest,
) -> dict[int, list[generation_pb2.GenerateResponse]]:
    seen: dict[int, list[generation_pb2.GenerateResponse]] = {}
    async for response in router.stub.Generate(request, timeout=60):
        seen.setdefault(response.index, []).append(response)
    return seen


async def test_every_choice_is_complete_and_has_its_own_seed() -> None:
    prefill, decode = pair()
    asked: list[types_pb2.EngineRequest] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        asked.append(request)

    prefill.at(Point.QUEUED, note)
    async with running_router(prefill, decode) as router:
        sampling = types_pb2.SamplingParams(seed=2**64 - 1)
        seen = await by_index(
            router,
            token_request(
                [1, 2, 3],
                max_tokens=3,
                n=3,
                request_id="r",
                sampling=sampling,
                num_prompt_logprobs=2,
            ),
        )
        await router.assert_nothing_left()
    assert sorted(seen) == [0, 1, 2]
    for responses in seen.values():
        assert {response.request_id for response in responses} == {"r"}
        assert [
            token for response in responses for token in response.chunk.token_ids
        ] == expected_tokens([1, 2, 3], 3)
        assert [response.HasField("finish") for response in responses] == [False] * (
            len(responses) - 1
        ) + [True]
        assert responses[-1].finish.usage.completion_tokens == 3
    asked.sort(key=lambda request: request.request_id)
    assert [request.sampling.seed for request in asked] == [
        2**64 - 1,
        (SEED_STRIDE - 1) % 2**64,
        (2 * SEED_STRIDE - 1) % 2**64,
    ]
    assert [request.HasField("num_prompt_logprobs") for request in asked] == [True, False, False]


async def test_cancelling_the_call_cancels_every_choice() -> None:
    prefill, decode = pair()
    decode.token_pause_s = 0.05
    async with running_router(prefill, decode) as router:
        call = router.stub.Generate(token_request([1], max_tokens=200, n=4), timeout=60)
        await call.read()
        await eventually(lambda: len(decode.open_requests) == 4, "four choices decoding")
        call.cancel()
        await router.assert_nothing_left()


async def test_abort_finishes_every_choice() -> None:
    prefill, decode = pair()
    decode.token_pause_s = 0.05
    async with running_router(prefill, decode) as router:
        reading = asyncio.create_task(
            by_index(router, token_request([1], max_tokens=200, n=3, request_id="r"))
        )
        await eventually(lambda: len(decode.open_requests) == 3, "three choices decoding")
        with pytest.raises(grpc.aio.AioRpcError):
            await by_index(router, token_request([1], request_id="r"))
        aborted = await router.stub.Abort(generation_pb2.AbortRequest(request_ids=["r", "r/1"]))
        assert list(aborted.aborted) == ["r"]
        ends = [responses[-1].finish.reason for responses in (await reading).values()]
        assert ends == [types_pb2.FINISH_REASON_ABORTED] * 3
        await router.assert_nothing_left()


async def test_the_first_error_ends_all_choices() -> None:
    prefill, decode = pair()
    decode.fail_at(Point.TOKEN, InternalError("a bug"), times=1)
    async with running_router(prefill, decode) as router:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await by_index(router, token_request([1], max_tokens=4, n=3))
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        await router.assert_nothing_left()


@pytest.mark.parametrize("of_the_second", [(1000,), (1, 1, 1, 2), (3, 2), (4, 1)])
async def test_scores_come_once_and_in_order_when_the_worker_is_replaced(
    of_the_second: tuple[int, ...],
) -> None:
    """The first worker says positions 1 to 3 of 1 to 5 and dies."""
    fabric, journal = Fabric(), Journal()
    workers = FakePrefill("a", fabric, journal), FakePrefill("b", fabric, journal)
    async with running_router(*workers, FakeDecode("decode", fabric, journal)) as router:
        first, second = sorted(workers, key=lambda worker: worker.address)
        first.scored_chunks, second.scored_chunks = (2, 1), of_the_second
        first.die_at(Point.COMPUTED)
        prompt = [5, 6, 7, 8, 9, 10]
        answer = await router.ask(token_request(prompt, max_tokens=2, num_prompt_logprobs=0))
        await router.assert_nothing_left()
    scored = [chunk.prompt_logprobs for chunk in answer.chunks if chunk.HasField("prompt_logprobs")]
    assert [token for part in scored for token in part.token_ids] == prompt[1:]
    assert [item.logprob for part in scored for item in part.logprobs] == [-1, -2, -3, -4, -5]
    assert [part.first_position for part in scored] == [1, 3, *range(4, 4 + len(scored) - 2)]
    assert all(not chunk.token_ids for chunk in answer.chunks if chunk.HasField("prompt_logprobs"))
    assert answer.token_ids == expected_tokens(prompt, 2)
