"""One request through real streams: the order of events, and every way it can go right."""

import asyncio
from itertools import accumulate

import grpc
import pytest

from protos import generation_pb2, types_pb2
from router.request.rejections import AdmissionLimits
from router.workers.policy import Policy
from runtime.errors import DeadlineError, DuplicateRequestError
from tests.router.harness import (
    EOS,
    byte_level_tokenizer,
    eventually,
    running_router,
    token_request,
)
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)


def pair(journal: Journal | None = None) -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), journal or Journal()
    return FakePrefill("prefill", fabric, journal), FakeDecode("decode", fabric, journal)


def prompt_for(text: str) -> list[int]:
    """Return a prompt whose first output token is the first token of `text`."""
    return [byte_level_tokenizer().encode(text).ids[0]]


async def test_events_come_in_the_order_of_a_life() -> None:
    journal = Journal()
    async with running_router(*pair(journal)) as router:
        answer = await router.ask(token_request([1, 2, 3], max_tokens=3))
        assert answer.token_ids == expected_tokens([1, 2, 3], 3)
        await router.assert_nothing_left()
    of_prefill = [what for worker, what in journal.entries if worker == "prefill"]
    of_decode = [what for worker, what in journal.entries if worker == "decode"]
    assert of_prefill == [
        Point.QUEUED,
        Point.STARTED,
        Point.COMPUTED,
        Point.SENDING,
        Point.SENT,
        Point.RELEASED,
    ]
    assert of_decode == [
        Point.RESERVE,
        Point.POSTING,
        Point.RESERVED,
        Point.COMMIT,
        Point.TOKEN,
        Point.TOKEN,
        Point.FINISH,
    ]
    order = journal.events().index
    assert order(Point.QUEUED) < order(Point.RESERVE), (
        "decode must not reserve while the prompt queues"
    )
    assert order(Point.RESERVED) < order(Point.SENDING)
    assert order(Point.COMMIT) < order(Point.RELEASED), (
        "prefill must hold its pages until the commit"
    )


async def test_finish_has_reason_usage_and_timing() -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request([1, 2, 3], max_tokens=4))
    assert answer.finish is not None
    assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.finish.WhichOneof("matched") is None
    assert (answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens) == (3, 4)
    timings = answer.finish.timings
    assert (timings.prefill_queue_s, timings.prefill_s, timings.transfer_exposed_s) == (
        0.25,
        0.125,
        0.0625,
    )
    assert (timings.decode_queue_s, timings.decode_s) == (0.03125, 0.5)
    assert timings.HasField("router_queue_s")
    assert 0 < timings.reserve_s <= timings.total_s


async def test_usage_counts_up_over_the_chunks() -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request([5], max_tokens=3))
    assert [chunk.usage.completion_tokens for chunk in answer.chunks] == list(
        accumulate(len(chunk.token_ids) for chunk in answer.chunks)
    )


async def test_first_token_reaches_the_client_before_decode_has_reserved() -> None:
    prefill, decode = pair()
    may_reserve = asyncio.Event()
    decode.at(Point.RESERVE, lambda _: may_reserve.wait())
    async with running_router(prefill, decode) as router:
        stream = router.stub.Generate(token_request([9], max_tokens=3)).__aiter__()
        first = await anext(stream)
        assert list(first.chunk.token_ids) == [9]
        may_reserve.set()
        rest = [token_id async for response in stream for token_id in response.chunk.token_ids]
        assert rest == [10, 11]


async def test_a_worker_slow_to_release_delays_no_finish() -> None:
    prefill, decode = pair()
    prefill.at(Point.RELEASED, lambda _: asyncio.sleep(3))
    async with running_router(prefill, decode) as router:
        async for response in router.stub.Generate(token_request([7], max_tokens=3)):
            if response.HasField("finish"):
                assert prefill.open_requests, "the finish came first"
        await router.assert_nothing_left()


async def test_a_request_of_one_token_ends_with_the_decode_worker() -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request([7], max_tokens=1))
        assert answer.token_ids == [7]
        assert answer.finish is not None
        assert answer.finish.reason == types_pb2.FINISH_REASON_LENGTH
        await router.assert_nothing_left()


@pytest.mark.parametrize(
    ("prompt", "expected"), [([EOS], [EOS]), ([EOS - 2], [EOS - 2, EOS - 1, EOS])]
)
async def test_end_of_sequence_ends_and_is_named(prompt: list[int], expected: list[int]) -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request(prompt, max_tokens=10))
    assert answer.token_ids == expected
    assert answer.finish is not None
    assert answer.finish.reason == types_pb2.FINISH_REASON_STOP
    assert answer.finish.stop_token_id == EOS


async def test_ignored_end_of_sequence_does_not_end() -> None:
    request = token_request([EOS], max_tokens=3)
    request.stop.ignore_eos = True
    async with running_router(*pair()) as router:
        answer = await router.ask(request)
    assert answer.token_ids == [EOS, 0, 1]


async def test_text_equals_the_decoding_of_all_ids() -> None:
    tokenizer = byte_level_tokenizer()
    async with running_router(*pair()) as router:
        answer = await router.ask(
            generation_pb2.GenerateRequest(
                text="the red lantern",
                stop=types_pb2.StopConditions(max_tokens=200, ignore_eos=True),
            )
        )
    assert answer.token_ids == expected_tokens(tokenizer.encode("the red lantern").ids, 200)
    assert answer.text == tokenizer.decode(answer.token_ids)


async def test_chat_is_rendered_with_the_template() -> None:
    messages = [generation_pb2.ChatMessage(role="user", content="red")]
    async with running_router(*pair()) as router:
        answer = await router.ask(
            generation_pb2.GenerateRequest(
                chat=generation_pb2.ChatMessages(messages=messages),
                stop=types_pb2.StopConditions(max_tokens=2),
            )
        )
    assert answer.token_ids == expected_tokens(
        byte_level_tokenizer().encode("<user>red<bot>").ids, 2
    )


async def test_skip_text_gives_ids_only() -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request([60], skip_text=True))
    assert answer.text == ""
    assert answer.token_ids == expected_tokens([60], 4)


async def test_a_stop_string_ends_and_frees_both_workers() -> None:
    journal = Journal()
    # Token ids from 2 on are the byte alphabet in order, so the fakes count through "!", '"', "#",
    # ...
    request = token_request(prompt_for("A"), max_tokens=100)
    request.stop.stop_strings.append("DE")
    prefill, decode = pair(journal)
    decode.token_pause_s = 0.05  # so that it is not at its end when it is stopped
    async with running_router(prefill, decode) as router:
        answer = await router.ask(request)
        assert answer.text == "ABC"
        assert byte_level_tokenizer().decode(answer.token_ids) == "ABCDE"
        assert answer.finish is not None
        assert answer.finish.reason == types_pb2.FINISH_REASON_STOP
        assert answer.finish.stop_string == "DE"
        await router.assert_nothing_left()
    assert Point.FINISH not in journal.events()


async def test_a_stop_string_in_the_first_token_never_decodes() -> None:
    journal = Journal()
    request = token_request(prompt_for("A"), max_tokens=100)
    request.stop.stop_strings.append("A")
    async with running_router(*pair(journal)) as router:
        answer = await router.ask(request)
        await router.assert_nothing_left()
    assert answer.text == ""
    assert answer.finish is not None
    assert answer.finish.stop_string == "A"
    assert Point.TOKEN not in journal.events()


async def test_a_stop_string_cuts_the_chunk_it_is_found_in() -> None:
    prefill, decode = pair()
    decode.tokens_per_chunk = 8
    request = token_request(prompt_for("A"), max_tokens=100, num_top_logprobs=0)
    request.stop.stop_strings.append("D")
    async with running_router(prefill, decode) as router:
        answer = await router.ask(request)
    assert byte_level_tokenizer().decode(answer.token_ids) == "ABCD"
    assert len(answer.chunks[1].logprobs) == len(answer.chunks[1].token_ids) == 3
    assert answer.finish is not None
    assert answer.finish.usage.completion_tokens == 4


async def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    request = token_request(prompt_for("A"), max_tokens=3)
    request.stop.stop_strings.append("BCX")
    async with running_router(*pair()) as router:
        answer = await router.ask(request)
    assert answer.text == "ABC"


async def test_logprobs_go_through() -> None:
    async with running_router(*pair()) as router:
        answer = await router.ask(token_request([4], max_tokens=3, num_top_logprobs=0))
    assert [p.logprob for chunk in answer.chunks for p in chunk.logprobs] == [-5.0, -6.0]


async def test_the_seed_is_generated_once_and_kept_if_given() -> None:
    seen: list[int] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        seen.append(request.sampling.seed)

    prefill, decode = pair()
    prefill.at(Point.QUEUED, note)
    decode.at(Point.RESERVE, note)
    async with running_router(prefill, decode) as router:
        await router.ask(token_request([4]))
        await router.ask(token_request([4], sampling=types_pb2.SamplingParams(seed=7)))
    assert seen[0] == seen[1]
    assert seen[2:] == [7, 7]


async def test_a_running_request_id_is_refused_a_second_time() -> None:
    prefill, decode = pair()
    decode.token_pause_s = 0.05
    async with running_router(prefill, decode) as router:
        first = asyncio.create_task(
            router.ask(token_request([1], max_tokens=20, request_id="mine"))
        )
        await eventually(lambda: decode.open_requests, "the first one")
        assert isinstance(
            await router.failure(token_request([1], request_id="mine")), DuplicateRequestError
        )
        assert len((await first).token_ids) == 20
        await router.ask(token_request([1], request_id="mine"))


@pytest.mark.parametrize(
    "point",
    [
        Point.QUEUED,
        Point.STARTED,
        Point.RESERVE,
        Point.RESERVED,
        Point.COMPUTED,
        Point.SENDING,
        Point.COMMIT,
        Point.TOKEN,
        Point.FINISH,
    ],
)
@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
async def test_cancelling_at_any_point_ends_both_streams(point: Point, how: str) -> None:
    prefill, decode = pair()
    reached = asyncio.Event()

    async def block(_: types_pb2.EngineRequest) -> None:
        reached.set()
        await asyncio.sleep(30)

    for worker in (prefill, decode):
        worker.at(point, block)
    async with running_router(prefill, decode) as router:
        request = token_request([3], max_tokens=4, request_id="r")
        if how == "deadline":
            error = await router.failure(request, timeout_s=0.3)
            assert isinstance(error, DeadlineError)
        else:
            call = router.stub.Generate(request)
            responses = asyncio.create_task(_collect(call))
            await reached.wait()
            if how == "cancel":
                call.cancel()
                await asyncio.gather(responses, return_exceptions=True)
            else:
                answer = await router.stub.Abort(
                    generation_pb2.AbortRequest(request_ids=["r", "unknown"])
                )
                assert list(answer.aborted) == ["r"]
                last = (await responses)[-1]
                assert last.finish.reason == types_pb2.FINISH_REASON_ABORTED
        await router.assert_nothing_left()


@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
async def test_cancelling_a_queued_request_removes_it(how: str) -> None:
    prefill, decode = pair()
    decode.serving = False
    async with running_router(
        prefill, decode, admission=AdmissionLimits(pairless_grace_s=30)
    ) as router:
        call = router.stub.Generate(
            token_request([3], request_id="r"), timeout=1.0 if how == "deadline" else None
        )
        responses = asyncio.create_task(_collect(call))
        await eventually(
            lambda: router.services.admission.num_waiting or responses.done(), "the queue"
        )
        if how == "abort":
            await router.stub.Abort(generation_pb2.AbortRequest(request_ids=["r"]))
            assert (await responses)[-1].finish.reason == types_pb2.FINISH_REASON_ABORTED
        else:
            if how == "cancel":
                call.cancel()
            await asyncio.gather(responses, return_exceptions=True)
        await router.assert_nothing_left()
    assert not prefill.journal.entries


async def _collect(
    call: "grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]",
) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def test_a_client_that_reads_slowly_gets_everything() -> None:
    async with running_router(*pair()) as router:
        token_ids: list[int] = []
        async for response in router.stub.Generate(token_request([0], max_tokens=200)):
            token_ids += response.chunk.token_ids
            if len(token_ids) % 50 == 0:
                await asyncio.sleep(0.05)
        assert token_ids == expected_tokens([0], 200)


async def test_metrics_move() -> None:
    async with running_router(*pair()) as router:
        await router.ask(token_request([1, 2, 3], max_tokens=4))
        assert router.metric("baton_ttft_seconds_count") == 1
        assert router.metric("baton_tpot_seconds_count") == 1
        assert router.metric("baton_itl_seconds_count") == 3
        assert router.metric("baton_e2e_seconds_count", outcome="length") == 1
        assert router.metric("baton_prompt_tokens_total") == 3
        assert router.metric("baton_completion_tokens_total") == 4
        assert (
            router.metric("baton_router_decisions_total", policy="least_load", result="chosen") == 2
        )
        assert router.metric("baton_router_workers", role="decode", state="usable") == 1
        assert (
            router.metric(
                "baton_requests_total", method="/baton.v1.Generation/Generate", grpc_code="OK"
            )
            == 1
        )
        for stage in (
            "admit",
            "prefill_queue",
            "prefill_exec",
            "handoff_wait",
            "transfer",
            "decode_queue",
            "decode",
        ):
            assert router.metric("baton_stage_seconds_count", stage=stage) == 1


@pytest.mark.parametrize("policy", list(Policy))
async def test_every_policy_serves(policy: Policy) -> None:
    fabric, journal = Fabric(), Journal()
    workers = [
        FakePrefill("p0", fabric, journal),
        FakePrefill("p1", fabric, journal),
        FakeDecode("d0", fabric, journal),
        FakeDecode("d1", fabric, journal),
    ]
    async with running_router(*workers, policy=policy) as router:
        answers = await asyncio.gather(
            *(router.ask(token_request([i, i + 1], max_tokens=3)) for i in range(20))
        )
        assert [a.token_ids for a in answers] == [expected_tokens([i, i + 1], 3) for i in range(20)]
        await router.assert_nothing_left()


async def test_load_spreads_over_equal_workers() -> None:
    fabric, journal = Fabric(), Journal()
    workers = [FakePrefill(f"p{i}", fabric, journal) for i in range(2)]
    pools = [FakeDecode(f"d{i}", fabric, journal) for i in range(2)]
    async with running_router(*workers, *pools) as router:
        await asyncio.gather(
            *(router.ask(token_request([1] * 20, max_tokens=3)) for _ in range(40))
        )
    for name in ("p0", "p1", "d0", "d1"):
        share = sum(
            worker == name and what in (Point.QUEUED, Point.RESERVE)
            for worker, what in journal.entries
        )
        assert 10 <= share <= 30, f"{name} got {share} of 40 requests"
