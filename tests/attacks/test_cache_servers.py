"""Cache servers that lie, stall and send garbage: every response is right, and nothing waits for them."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from engine.core.layer_range import LayerRange, TensorRank
from engine.core.request import Request, SamplingParams
from pool.tiers import block_tier, cache_server, stage_blocks
from pool.tiers.block_store import Content, ObjectKey, StagePart
from pool.tiers.cache_server import CacheServer
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import make_checkpoint
from tests.support.network.authority import Authority

PAGE = 16
PROMPT = tuple(random.Random(3).choices(range(3, 256), k=200))
QUESTION = Request("q", PROMPT, 8, SamplingParams(temperature=0.0), num_top_logprobs=0)
OBJECT = ObjectKey(bytes(16), Content.PAGE, StagePart(LayerRange(0, 1), TensorRank()))
ENDS_S = 45.0  # for a cluster to answer and to end; less than the longest lie

Answer = Callable[[asyncio.StreamWriter, list[bytes]], Awaitable[None]]


def bulk(content: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(content), content)


class LyingServer:
    """A server that stores what it is given, and answers some commands in its own way."""

    def __init__(self, **lies: Answer) -> None:
        self.blocks: dict[bytes, dict[bytes, bytes]] = {}
        self.num_lies = 0
        self._lies = lies

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                words = await _command(reader)
                lie = self._lies.get(words[0].decode().lower())
                if lie is None:
                    writer.write(self._answer(words))
                else:
                    self.num_lies += 1
                    await lie(writer, words)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, words: list[bytes]) -> bytes:
        block = self.blocks.setdefault(words[1], {}) if len(words) > 1 else {}
        match words[0].lower():
            case b"hkeys":
                return b"*%d\r\n" % len(block) + b"".join(map(bulk, block))
            case b"hstrlen":
                return b":%d\r\n" % len(block.get(words[2], b""))
            case b"hget":
                return bulk(block[words[2]]) if words[2] in block else b"$-1\r\n"
            case b"hset":
                block[words[2]] = words[3]
                return b":1\r\n"
            case b"info":
                return bulk(b"used_memory:1\r\nmaxmemory:100\r\nmaxmemory_policy:allkeys-lru\r\n")
            case _:
                return b":0\r\n"


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


@asynccontextmanager
async def listening(server: LyingServer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as running:
        host, port = running.sockets[0].getsockname()
        yield f"{'redis' if tls is None else 'rediss'}://{host}:{port}"


async def trickle(writer: asyncio.StreamWriter, words: list[bytes]) -> None:
    """Send a byte often enough to count as alive."""
    writer.write(b"$100000\r\n")
    for _ in range(600):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def be_silent(writer: asyncio.StreamWriter, words: list[bytes]) -> None:
    await asyncio.sleep(60)


async def hang_up(writer: asyncio.StreamWriter, words: list[bytes]) -> None:
    raise ConnectionResetError


def saying(content: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter, words: list[bytes]) -> None:
        writer.write(content)

    return answer


LIES: dict[str, dict[str, Answer]] = {
    "trickles": {"hget": trickle},
    "is silent": {"hget": be_silent},
    "hangs up": {"hget": hang_up},
    "sends garbage": {"hget": saying(b"\x00\xff garbage\r\n")},
    "sends an error": {"hget": saying(b"-ERR \xff\r\n")},
    "sends a list": {"hget": saying(b"*2\r\n:1\r\n:2\r\n")},
    "sends a number": {"hget": saying(b":7\r\n")},
    "sends zeros": {"hget": saying(bulk(bytes(9000)))},
    "states a wrong size": {"hstrlen": saying(b":9000\r\n"), "hget": saying(bulk(bytes(9000)))},
    "states no size": {"hstrlen": saying(b"$-1\r\n")},
    "states a huge size": {"hstrlen": saying(b":4611686018427387904\r\n")},
    "states a text": {"hstrlen": saying(bulk(b"many"))},
    "lists no list": {"hkeys": saying(b":1\r\n")},
    "lists numbers": {"hkeys": saying(b"*2\r\n:1\r\n:2\r\n")},
    "lists everything": {"hkeys": saying(b"*1\r\n" + bulk(b"page.0-4.0of1"))},
    "lists nothing": {"hkeys": saying(b"*-1\r\n")},
    "trickles lists": {"hkeys": trickle},
    "trickles facts": {"info": trickle},
    "is silent to lists": {"hkeys": be_silent},
    "is silent to writes": {"hset": be_silent},
    "has odd facts": {"info": saying(bulk(b"used_memory:x\r\nmaxmemory:-1\r\n"))},
    "has no facts": {"info": saying(b":1\r\n")},
}

KEPT = {"trickles", "sends garbage", "lists numbers", "trickles lists", "is silent to writes"}


@pytest.mark.parametrize(
    "lies", [pytest.param(lies, marks=() if lies in KEPT else pytest.mark.long) for lies in LIES]
)
async def test_a_server_changes_no_answer_and_holds_nothing_up(
    lies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_tier, "READ_LIMIT_S", 1.0)
    monkeypatch.setattr(stage_blocks, "LIMIT_S", 1.0)
    monkeypatch.setattr(cache_server, "SILENT_S", 0.5)
    monkeypatch.setattr(cache_server, "AVOID_S", 1.0)  # a busy machine may be silent for once, too
    model = make_checkpoint(tmp_path, "llama", dtype=torch.float32)
    (expected,) = on_the_wire(Reference(model).answers([QUESTION]))
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    server = LyingServer(**LIES[lies])
    async with listening(server) as url, asyncio.timeout(ENDS_S):
        settings = {"cache_server": url, "cache_server_key": key, "page_size": PAGE}
        async with cluster_in_process(model, **settings, chunk_tokens=64) as client:  # type: ignore[arg-type]
            num_asked = 0
            while num_asked < 3 or not server.num_lies:
                num_asked += 1
                completion = await client.complete(as_query(QUESTION), timeout_s=60)
                assert shown(completion) == expected
                await asyncio.sleep(0.2)
                await client.flush_caches()


async def test_over_tls_both_ends_need_certificates_of_the_authority(tmp_path: Path) -> None:
    authority, stranger = Authority(), Authority("a stranger")
    own = authority.files(tmp_path / "server", "cache-server")
    client = authority.files(tmp_path / "client", "worker")
    strange = stranger.files(tmp_path / "stranger", "worker")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=own.ca)
    tls.load_cert_chain(str(own.cert), str(own.key))
    tls.verify_mode = ssl.CERT_REQUIRED
    stored = {}
    async with listening(LyingServer(), tls) as url:
        for name, options in {
            "as it should be": f"ssl_ca_certs={own.ca}&ssl_certfile={client.cert}&ssl_keyfile={client.key}",
            "no certificate": f"ssl_ca_certs={own.ca}",
            "a stranger's": f"ssl_ca_certs={own.ca}&ssl_certfile={strange.cert}&ssl_keyfile={strange.key}",
            "another authority": f"ssl_ca_certs={strange.ca}&ssl_certfile={client.cert}&ssl_keyfile={client.key}",
            "the system's authorities": f"ssl_certfile={client.cert}&ssl_keyfile={client.key}",
        }.items():
            store = CacheServer(f"{url}?{options}", bytes(range(32)), expire_s=60)
            stored[name] = await asyncio.to_thread(store.put, OBJECT, (memoryview(b"bytes"),))
            await asyncio.to_thread(store.close)
    assert stored == dict.fromkeys(stored, False) | {"as it should be": True}
