"""Clients cannot affect the requests of other clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from protos import generation_pb2, types_pb2
from router.api.generation import MAX_ABORT_IDS, RequestLimits, client_salt
from router.request.cache_hints import RETENTION_S
from router.request.client_limits import LimitsFile
from router.request.priorities import PriorityLimits
from router.workers.report import without_addresses
from runtime.clock import SystemClock
from runtime.errors import BatonError, CapacityError, DuplicateRequestError, InvalidRequestError
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ServerSecurity, address_of
from runtime.security.tokens import TokenList
from tests.router.harness import RouterHarness, eventually, running_router, token_request
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal, Point

ALICE, BOB = (
    (("authorization", "Bearer token-of-alice-1234"),),
    (("authorization", "Bearer token-of-bob-123456"),),
)
TOKENS = "alice token-of-alice-1234\nalice second-token-of-alice\ntoken-of-bob-123456\n"
PROMPT = [1, 2, 3]


@asynccontextmanager
async def shared_router(
    folder: Path, *, salts_by_client: bool = False
) -> AsyncIterator[RouterHarness]:
    """Run a router with a slow pool for two clients."""
    (folder / "tokens").write_text(TOKENS)
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    decode.token_pause_s = 0.01
    limits = RequestLimits(60.0, 30.0, PriorityLimits.parse(["alice=-100", "*=0"]), salts_by_client)
    async with running_router(
        prefill, decode, security=ServerSecurity(tokens=TokenList(folder / "tokens")), limits=limits
    ) as router:
        yield router


async def answered(
    router: RouterHarness,
    request: generation_pb2.GenerateRequest,
    metadata: tuple[tuple[str, str], ...],
) -> types_pb2.FinishReason:
    """Return the finish reason; raise the BatonError of the status."""
    try:
        *_, last = [
            response
            async for response in router.stub.Generate(request, metadata=metadata, timeout=60)
        ]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return last.finish.reason


async def test_ids_belong_to_the_client_that_chose_them(tmp_path: Path) -> None:
    async with shared_router(tmp_path) as router:
        request = token_request(PROMPT, max_tokens=200, request_id="r1")
        running = router.stub.Generate(request, metadata=ALICE).__aiter__()
        await anext(running)
        guessed = generation_pb2.AbortRequest(request_ids=["r1", "r2"])
        assert list((await router.stub.Abort(guessed, metadata=BOB)).aborted) == [], (
            "another one's is not there"
        )
        short = token_request(PROMPT, max_tokens=2, request_id="r1")
        assert await answered(router, short, BOB) == types_pb2.FINISH_REASON_LENGTH, (
            "and does not squat"
        )
        with pytest.raises(DuplicateRequestError):
            await answered(router, short, ALICE)
        second = (("authorization", "Bearer second-token-of-alice"),)
        assert list((await router.stub.Abort(guessed, metadata=second)).aborted) == ["r1"], (
            "her name, another token"
        )
        *_, last = [response async for response in running]
        assert last.finish.reason == types_pb2.FINISH_REASON_ABORTED
        await eventually(lambda: not router.service._running, "requests in the router")


async def test_an_abort_names_a_bounded_number_of_requests(tmp_path: Path) -> None:
    async with shared_router(tmp_path) as router:
        many = generation_pb2.AbortRequest(request_ids=[str(i) for i in range(MAX_ABORT_IDS + 1)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.Abort(many, metadata=ALICE)
        error: BatonError = error_from_rpc(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == "request_ids"
        assert "1025 entries, the limit is 1024" in error.violations[0].description


async def test_priorities_a_client_may_use_are_a_setting(tmp_path: Path) -> None:
    async with shared_router(tmp_path) as router:
        for priority in (-100, 0, 100):
            assert await answered(router, token_request(PROMPT, priority=priority), ALICE)
        assert await answered(router, token_request(PROMPT, priority=5), BOB)
        with pytest.raises(
            InvalidRequestError, match="must be between 0 and 100 for this client, got -1"
        ):
            await answered(router, token_request(PROMPT, priority=-1), BOB)


async def test_a_client_that_may_not_be_urgent_need_not_say_so(tmp_path: Path) -> None:
    """The example of the page on security."""
    (tmp_path / "tokens").write_text("ops token-of-alice-1234\nbatch token-of-bob-123456\n")
    fabric, journal = Fabric(), Journal()
    prefill, decode = FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    seen: list[int] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        seen.append(request.priority)

    prefill.at(Point.QUEUED, note)
    limits = RequestLimits(60.0, 30.0, PriorityLimits.parse(["ops=-100", "batch=10"]))
    async with running_router(
        prefill,
        decode,
        security=ServerSecurity(tokens=TokenList(tmp_path / "tokens")),
        limits=limits,
    ) as router:
        for metadata, priority in ((BOB, 0), (BOB, 10), (BOB, 20), (ALICE, 0), (ALICE, -100)):
            await answered(router, token_request(PROMPT, priority=priority), metadata)
        with pytest.raises(
            InvalidRequestError, match="must be between 10 and 100 for this client, got 5"
        ):
            await answered(router, token_request(PROMPT, priority=5), BOB)
    assert seen == [10, 10, 20, 0, -100]


async def test_addresses_of_workers_are_for_operators(tmp_path: Path) -> None:
    async def addresses(
        router: RouterHarness, metadata: tuple[tuple[str, str], ...] = ()
    ) -> list[str]:
        status = await router.stub.GetClusterStatus(
            generation_pb2.GetClusterStatusRequest(), metadata=metadata
        )
        return [worker.address for worker in status.workers]

    async with shared_router(tmp_path) as router:
        assert await addresses(router, ALICE) == ["prefill-0", "decode-0"]
    fabric, journal = Fabric(), Journal()
    async with running_router(
        FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    ) as router:
        assert await addresses(router) == [each.address for each in router.workers], (
            "everybody may flush caches, too"
        )


def test_a_client_sees_the_error_of_a_worker_but_not_its_address() -> None:
    def status(role: str, reason: str) -> generation_pb2.WorkerStatus:
        return generation_pb2.WorkerStatus(role=role, address="10.0.0.1:7", reason=reason)

    shown = without_addresses(
        [
            status("prefill", ""),
            status("decode", "cannot be reached: ipv4:10.0.0.1:7: refused"),
            status("decode", "it is a worker with another address, too: 10.0.0.2:7"),
        ]
    )
    assert [(each.address, each.reason) for each in shown] == [
        ("prefill-0", ""),
        ("decode-0", "cannot be reached"),
        ("decode-1", "it is a worker with another address, too"),
    ]


async def test_priority_needs_a_setting() -> None:
    fabric, journal = Fabric(), Journal()
    async with running_router(
        FakePrefill("p", fabric, journal),
        FakeDecode("d", fabric, journal),
        limits=RequestLimits(60.0, 30.0),
    ) as router:
        error = await router.failure(token_request(PROMPT, priority=-100))
        assert isinstance(error, InvalidRequestError)
        assert error.violations[0].field == "priority"


async def test_a_client_in_a_hurry_passes_its_own_requests_and_no_other_clients(
    tmp_path: Path,
) -> None:
    """A pool for one request at a time: clients are served in turn, whatever the deadlines of their
    requests."""
    (tmp_path / "tokens").write_text(TOKENS)
    fabric, journal = Fabric(), Journal()
    prefill, decode = (
        FakePrefill("p", fabric, journal),
        FakeDecode("d", fabric, journal, max_running=1),
    )
    order: list[str] = []
    may_go = asyncio.Event()

    async def note(request: types_pb2.EngineRequest) -> None:
        order.append(request.request_id)
        await may_go.wait()

    prefill.at(Point.QUEUED, note)
    security = ServerSecurity(tokens=TokenList(tmp_path / "tokens"))
    async with running_router(prefill, decode, security=security) as router:
        calls = []
        for number, (name, metadata, timeout_s) in enumerate(
            [
                ("first", BOB, 600),
                ("patient", BOB, 600),
                ("patient", BOB, 600),
                ("hurry", ALICE, 40),
                ("hurry", ALICE, 30),
                ("hurry", ALICE, 20),
            ]
        ):
            request = token_request(PROMPT, max_tokens=2, request_id=f"{name} {number}")
            calls.append(router.stub.Generate(request, metadata=metadata, timeout=timeout_s))
            await eventually(
                lambda: len(order) + router.services.admission.num_waiting == len(calls), "a call"
            )
        may_go.set()
        for call in calls:
            assert [response async for response in call]
    assert order == ["first 0", "patient 1", "hurry 5", "patient 2", "hurry 4", "hurry 3"]


async def test_prompts_with_logprobs_of_a_client_use_a_share_of_prefill_places(
    tmp_path: Path,
) -> None:
    """Of eight places two; what it sends beyond that waits for its own, and not its other
    requests."""
    (tmp_path / "tokens").write_text(TOKENS)
    fabric, journal = Fabric(), Journal()
    prefill, decode = (
        FakePrefill("p", fabric, journal, max_running=8),
        FakeDecode("d", fabric, journal),
    )
    there: list[str] = []
    may_go = asyncio.Event()

    async def note(request: types_pb2.EngineRequest) -> None:
        there.append(request.request_id)
        await may_go.wait()

    prefill.at(Point.QUEUED, note)
    security = ServerSecurity(tokens=TokenList(tmp_path / "tokens"))
    async with running_router(prefill, decode, security=security) as router:
        calls = []
        for name, metadata, is_scored in (
            ("a1", ALICE, True),
            ("a2", ALICE, True),
            ("a3", ALICE, True),
            ("a4", ALICE, False),
            ("b1", BOB, True),
        ):
            request = token_request(PROMPT, max_tokens=2, request_id=name)
            if is_scored:
                request.num_prompt_logprobs = 0
            calls.append(router.stub.Generate(request, metadata=metadata, timeout=60))
            await eventually(lambda: router.service.num_active == len(calls), "a call")
        await eventually(lambda: len(there) == 4, "requests at the worker")
        assert sorted(there) == ["a1", "a2", "a4", "b1"]
        may_go.set()
        for call in calls:
            assert [response async for response in call]


async def test_output_lengths_are_learned_per_client(tmp_path: Path) -> None:
    async with shared_router(tmp_path) as router:
        await answered(router, token_request(PROMPT, max_tokens=9), ALICE)
        habits = router.services.service_model.habits
        assert habits.expected_tokens("token:alice", 9) == 9
        assert habits.expected_tokens("", 9) == 0
        await answered(router, token_request(PROMPT, max_tokens=9), BOB)
        assert len(habits._clients) == 2


async def test_clients_without_credentials_are_identified_by_address() -> None:
    fabric, journal = Fabric(), Journal()
    async with running_router(
        FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    ) as router:
        await router.ask(token_request(PROMPT, max_tokens=9))
        assert list(router.services.service_model.habits._clients) == ["7f000001"]
    for peer, account in (
        ("ipv4:10.0.0.1:77", "0a000001"),
        ("ipv6:%5B2001:db8:0:7::1%5D:77", "20010db800000007"),
        ("unix:", "unix:"),
        ("ipv6:[::ffff:10.0.0.1]:5", "0a000001"),
    ):
        assert address_of(peer) == account


@pytest.mark.parametrize("salts_by_client", [True, False])
async def test_clients_share_cached_prompts_only_if_a_setting_allows(
    tmp_path: Path,
    salts_by_client: bool,  # noqa: FBT001
) -> None:
    """A client that sends the salt of another client's prompts does not reach them either."""
    salts: list[str] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        salts.append(request.cache_salt)

    async with shared_router(tmp_path, salts_by_client=salts_by_client) as router:
        router.workers[0].at(Point.QUEUED, note)
        second = (("authorization", "Bearer second-token-of-alice"),)
        for metadata, salt in ((ALICE, ""), (second, ""), (ALICE, "own"), (BOB, ""), (BOB, "own")):
            await answered(router, token_request(PROMPT, cache_salt=salt), metadata)
        if not salts_by_client:
            assert salts == ["", "", "own", "", "own"]
            return
        await answered(router, token_request(PROMPT, cache_salt=salts[0]), BOB)
        assert salts[0] == salts[1], "one client with two tokens"
        assert len(set(salts)) == len(salts) - 1
    assert client_salt("ab", "c") != client_salt("a", "bc")


async def test_a_session_is_that_of_its_client_and_salt(tmp_path: Path) -> None:
    """Workers see digests: the same for a client's session, named by a field or by metadata."""
    sessions: list[types_pb2.CacheSession] = []
    shares: list[types_pb2.ClientShare] = []

    async def note(request: types_pb2.EngineRequest) -> None:
        assert request.HasField("session") is bool(request.session.digest)
        shares.append(request.share)
        sessions.append(request.session)

    async with shared_router(tmp_path) as router:
        router.workers[0].at(Point.QUEUED, note)
        named = generation_pb2.KvHints(
            protocol_version="0.1",
            actions=[
                generation_pb2.KvHintAction(action_type=name, action_version="0.1", payload=payload)
                for name, payload in (
                    ("kv.retain", '{"ttl_seconds": 7}'),
                    ("kv.evict", ""),
                    ("kv.fetch", ""),
                    ("kv.retain", "{"),
                )
            ],
        )
        for metadata, request in (
            (ALICE, token_request(PROMPT, session_id="s")),
            ((*ALICE, ("x-session-affinity", "s")), token_request(PROMPT)),
            (ALICE, token_request(PROMPT, session_id="s", kv_hints=named)),
            (ALICE, token_request(PROMPT, session_id="s", cache_salt="own")),
            (ALICE, token_request(PROMPT, session_id="t")),
            (BOB, token_request(PROMPT, session_id="s")),
            (ALICE, token_request(PROMPT)),
        ):
            await answered(router, request, metadata)
        counts = [
            router.metric("baton_router_kv_hints_total", action=action, outcome=outcome)
            for action, outcome in (
                ("kv.retain", "applied"),
                ("kv.evict", "applied"),
                ("other", "unknown"),
                ("kv.retain", "invalid"),
                ("kv.evict", "invalid"),
            )
        ]
    first, *_, none = sessions
    assert sessions[1] == first
    assert (first.retention_s, first.ends) == (RETENTION_S, False)
    assert sessions[2] == types_pb2.CacheSession(
        digest=first.digest, client=first.client, retention_s=7.0, ends=True
    )
    assert len({each.digest for each in sessions}) == 5
    assert [each.client == first.client for each in sessions] == [True] * 5 + [False] * 2
    assert none == types_pb2.CacheSession()
    assert {each.weight for each in shares} == {1.0}
    alice, bob = first.client, sessions[5].client
    assert [each.client for each in shares] == [alice] * 5 + [bob, alice]
    assert counts == [1.0, 1.0, 1.0, 1.0, 0.0]


async def test_a_quota_is_refused_with_its_name_and_when_it_refills(tmp_path: Path) -> None:
    """Generated tokens are charged as they were generated; each client has its own quota."""
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "clients").write_text("[alice]\ngenerated_tokens_per_minute = 20\n")
    fabric, journal = Fabric(), Journal()
    limits = RequestLimits(60.0, 30.0, clients=LimitsFile(tmp_path / "clients", SystemClock()))
    async with running_router(
        FakePrefill("p", fabric, journal),
        FakeDecode("d", fabric, journal),
        security=ServerSecurity(tokens=TokenList(tmp_path / "tokens")),
        limits=limits,
    ) as router:
        request = token_request(PROMPT, max_tokens=12)
        await answered(router, request, ALICE)
        with pytest.raises(CapacityError, match="quota of 20 generated tokens a minute") as refused:
            await answered(router, request, ALICE)
        assert refused.value.resource == "generated_tokens_per_minute"
        # 12 tokens are expected again, and 8 are left of a quota that gains one in three seconds.
        assert refused.value.retry_after_s is not None
        assert 10 < refused.value.retry_after_s <= 12
        for _ in range(4):
            await answered(router, request, BOB)
        value = router.registry.get_sample_value
        for client, tokens in (("alice", 12), ("other", 48)):
            labels = {"client": client, "kind": "generated"}
            assert value("baton_client_tokens_total", labels) == tokens
