import asyncio
import gzip
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from protos import generation_pb2 as pb
from protos import types_pb2
from runtime.errors import CapacityError, DeadlineError, InvalidRequestError
from runtime.rpc.message_bounds import (
    FREE_INFLATED_BYTES,
    MAX_INFLATION,
    MAX_NUMBERS,
    MAX_PARTS,
    MessageBounds,
    bounded,
    held_bytes,
)
from runtime.rpc.read_limits import CallLimiter, ReadLimiter, ReadLimits
from tests.router.harness import eventually


def at_once(release: Callable[[], None]) -> None:
    release()


async def never() -> str:
    await asyncio.sleep(600)
    return "never"


async def ready() -> str:
    return "read"


async def test_a_ready_message_waits_only_for_the_crowded_timeout() -> None:
    read_limiter = ReadLimiter(ReadLimits(places=2, crowded_timeout_s=0.05, timeout_s=60))
    dribbling = [asyncio.create_task(read_limiter.receive(never, at_once)) for _ in range(6)]
    await eventually(lambda: read_limiter.num_reading == 2, "no reads")
    async with asyncio.timeout(20):
        assert await read_limiter.receive(ready, at_once) == "read"
    failed = [task for task in dribbling if task.done()]
    assert failed, "the ones read for longest made room"
    assert all(isinstance(task.exception(), DeadlineError) for task in failed)
    for task in dribbling:
        task.cancel()
    await asyncio.gather(*dribbling, return_exceptions=True)
    assert read_limiter.num_reading == 0


async def test_a_client_without_messages_blocks_itself_alone() -> None:
    """It has half of the places, and others have their turns before its further messages."""
    read_limiter = ReadLimiter(ReadLimits(places=4, crowded_timeout_s=60, timeout_s=600))
    silent = [asyncio.create_task(read_limiter.receive(never, at_once, "a")) for _ in range(200)]
    await eventually(lambda: read_limiter.num_reading == 2, "no reads")
    async with asyncio.timeout(20):
        for client in ("b", "c", "b"):
            assert await read_limiter.receive(ready, at_once, client) == "read"
    slow = [asyncio.create_task(read_limiter.receive(never, at_once, "b")) for _ in range(2)]
    await eventually(lambda: read_limiter.num_reading == 4, "no reads")
    waiting = asyncio.create_task(read_limiter.receive(ready, at_once, "c"))
    await asyncio.sleep(0)
    slow[0].cancel()
    async with asyncio.timeout(20):
        assert await waiting == "read", "the free place is not for one that has its share"
    for task in (*silent, *slow):
        task.cancel()
    await asyncio.gather(*silent, *slow, return_exceptions=True)
    assert read_limiter.num_reading == 0
    assert await read_limiter.receive(ready, at_once, "a") == "read"


async def test_a_client_with_its_share_hurries_its_own_messages_alone() -> None:
    read_limiter = ReadLimiter(ReadLimits(places=2, crowded_timeout_s=0.05, timeout_s=60))
    other = asyncio.create_task(read_limiter.receive(never, at_once, "b"))
    await eventually(lambda: read_limiter.num_reading == 1, "no read")
    silent = [asyncio.create_task(read_limiter.receive(never, at_once, "a")) for _ in range(5)]
    await asyncio.wait(silent[:4], timeout=20)
    assert all(isinstance(task.exception(), DeadlineError) for task in silent[:4])
    assert not other.done()
    for task in (other, silent[4]):
        task.cancel()
    await asyncio.gather(other, *silent, return_exceptions=True)


async def test_reads_keep_their_timeout_while_there_is_room() -> None:
    read_limiter = ReadLimiter(ReadLimits(places=2, crowded_timeout_s=0.001, timeout_s=60))
    slow = asyncio.create_task(read_limiter.receive(never, at_once))
    for _ in range(100):
        assert await read_limiter.receive(ready, at_once) == "read"
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_a_missing_message_times_out_and_keeps_its_place_until_call_end() -> None:
    read_limiter, over = (
        ReadLimiter(ReadLimits(places=1, crowded_timeout_s=60, timeout_s=0.05)),
        list[Callable[[], None]](),
    )
    with pytest.raises(DeadlineError):
        await read_limiter.receive(never, over.append)
    with pytest.raises(CapacityError, match="1 messages are being received"):
        await read_limiter.receive(ready, over.append)
    over[0]()
    assert await read_limiter.receive(ready, over.append) == "read"
    assert len(over) == 1


async def test_a_cancelled_read_gives_its_place_back() -> None:
    read_limiter = ReadLimiter(ReadLimits(places=1, crowded_timeout_s=60, timeout_s=60))
    task = asyncio.create_task(read_limiter.receive(never, at_once))
    await eventually(lambda: read_limiter.num_reading, "no read")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await read_limiter.receive(ready, at_once) == "read"


def test_seats_bound_calls_and_bytes_and_are_given_back() -> None:
    limiter = CallLimiter("calls", 2, 100)
    with limiter.taken(), limiter.taken(), limiter.holding(60):
        with pytest.raises(CapacityError, match="2 calls are open"), limiter.taken():
            pass
        with (
            pytest.raises(CapacityError, match="60 bytes and this one 41; the limit is 100"),
            limiter.holding(41),
        ):
            pass
        with limiter.holding(40):
            assert limiter.num_bytes == 100
    assert (limiter.num_calls, limiter.num_bytes) == (0, 0)
    with limiter.holding(101):
        pass  # one alone is bounded by the size of a message


def test_a_client_with_many_calls_leaves_places_to_others() -> None:
    """Of nine places it has eight, of 900 bytes 800; as many clients as there are share the rest
    likewise."""
    limiter = CallLimiter("calls", 9, 900)
    with ExitStack() as calls:
        for _ in range(8):
            calls.enter_context(limiter.taken("a"))
        with (
            pytest.raises(CapacityError, match=r"8 calls of this client .* and 1 are left"),
            limiter.taken("a"),
        ):
            pass
        with (
            limiter.taken("b"),
            pytest.raises(CapacityError, match="9 calls are open"),
            limiter.taken("c"),
        ):
            pass
        with limiter.holding(500, "a"), limiter.holding(300, "a"):
            with (
                pytest.raises(CapacityError, match="have 800 bytes and this one 1, and 99"),
                limiter.holding(1, "a"),
            ):
                pass
            with limiter.holding(90, "b"):
                pass
        with limiter.holding(901, "a"):
            pass
    routers = CallLimiter("calls", 9, 900)
    with ExitStack() as calls:
        for _ in range(9):
            calls.enter_context(routers.taken())
            calls.enter_context(routers.holding(100))
    assert not limiter._calls_of
    assert not limiter._bytes_of


def test_a_too_long_message_is_not_parsed_and_a_malformed_one_is_named() -> None:
    parse = bounded(pb.AbortRequest.FromString, MessageBounds(4))
    assert parse(b"\x0a\x02ab").request_ids == ["ab"]
    with pytest.raises(InvalidRequestError, match="at most 4 bytes, this one has 5"):
        parse(b"\x0a\x03abc")
    with pytest.raises(InvalidRequestError, match="not a message of its type"):
        parse(b"\xff\xff")


COUNTED = MessageBounds(16 << 20, uncounted_bytes=0)


def chat(num_messages: int) -> bytes:
    """Encode one field, and an empty one for each message."""
    return pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage()] * num_messages)
    ).SerializeToString()


def test_parts_are_counted_before_a_message_is_parsed() -> None:
    parse = bounded(pb.GenerateRequest.FromString, COUNTED)
    assert len(parse(chat(MAX_PARTS - 1)).chat.messages) == MAX_PARTS - 1
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_PARTS} fields and entries"):
        parse(chat(MAX_PARTS))
    biases = pb.GenerateRequest(
        sampling=types_pb2.SamplingParams(logit_bias=dict.fromkeys(range(MAX_PARTS), 1.0))
    )
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_PARTS} fields and entries"):
        parse(biases.SerializeToString())
    small = bounded(
        pb.GenerateRequest.FromString, MessageBounds(16 << 20, uncounted_bytes=len(chat(MAX_PARTS)))
    )
    assert len(small(chat(MAX_PARTS)).chat.messages) == MAX_PARTS, (
        "what is cheap to parse is not counted"
    )


def test_numbers_are_counted_before_a_message_is_parsed() -> None:
    def request(*lengths: int) -> bytes:
        return pb.GenerateRequest(
            resumed=[types_pb2.TokenIds(ids=[300] * length) for length in lengths],
        ).SerializeToString()

    parse = bounded(pb.GenerateRequest.FromString, COUNTED)
    assert len(parse(request(MAX_NUMBERS)).resumed[0].ids) == MAX_NUMBERS
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_NUMBERS} numbers"):
        parse(request(MAX_NUMBERS // 2, MAX_NUMBERS // 2 + 1))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x2a\x05\x0a",  # a chat of five bytes, of which one is there
        b"\x08" + b"\xff" * (1 << 20),  # a number without an end
        b"\x2b\x2c",  # a group
        b"\x1d\x00",  # four bytes, of which one is there
        b"\x1f",  # no field is of this type
    ],
)
def test_a_malformed_message_is_refused_while_counting(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not a message of its type"):
        bounded(pb.GenerateRequest.FromString, COUNTED)(raw)


def test_compressed_messages_are_inflated_up_to_a_ratio() -> None:
    parse = bounded(pb.GenerateRequest.FromString, MessageBounds(16 << 20))
    text = "".join(f"{number} cats. " for number in range(20_000))
    assert parse(gzip.compress(pb.GenerateRequest(text=text).SerializeToString())).text == text
    zeros = gzip.compress(bytes(16 << 20))
    limit = FREE_INFLATED_BYTES + MAX_INFLATION * len(zeros)
    with pytest.raises(
        InvalidRequestError, match=f"of {len(zeros)} bytes may have at most {limit} when"
    ):
        parse(zeros)
    with pytest.raises(InvalidRequestError, match="may have at most 100 when"):
        bounded(pb.GenerateRequest.FromString, MessageBounds(100))(gzip.compress(bytes(101)))
    for damaged in (zeros[:2], zeros[:20] + zeros[30:], gzip.compress(b"\x0a\x01a")[:-1]):
        with pytest.raises(
            InvalidRequestError, match=r"not a message of its type|when it is inflated"
        ):
            parse(damaged)


def test_no_more_of_a_message_is_inflated_than_it_may_have() -> None:
    parse = bounded(pb.GenerateRequest.FromString, MessageBounds(16 << 20))
    zeros = gzip.compress(bytes(64 << 20))
    limit = FREE_INFLATED_BYTES + MAX_INFLATION * len(zeros)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="when it is inflated"):
        parse(zeros)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * limit < 32 << 20


def test_the_memory_of_parsed_token_ids_is_counted() -> None:
    """Four bytes each in the request, in what a worker is sent, and as machine integers."""
    ids = types_pb2.TokenIds(ids=[5] * 1000)
    request = pb.GenerateRequest(token_ids=ids, resumed=[ids], resumed_from=["a"])
    assert held_bytes(request) == request.ByteSize() + 2000 * 12
    assert (
        held_bytes(pb.GenerateRequest(text="x" * 1000))
        == pb.GenerateRequest(text="x" * 1000).ByteSize()
    )
