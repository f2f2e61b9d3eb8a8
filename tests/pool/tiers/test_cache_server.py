"""Objects on a real server: what is stored, who sees it, and what happens when it fails."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from pool.tiers import cache_server
from pool.tiers.block_store import Content, ObjectKey, StagePart
from pool.tiers.cache_server import CacheServer
from runtime.errors import ConfigError
from runtime.process.host_memory import MIB
from tests.support.cache_servers import KEY, RunningServer, running_server

PART = StagePart(LayerRange(0, 2), TensorRank())
PIECES = (memoryview(b"one"), memoryview(b"and two"))
SIZE = 10


def key(number: int, content: Content = Content.PAGE) -> ObjectKey:
    return ObjectKey(number.to_bytes(16, "little"), content, PART)


def blank() -> tuple[memoryview, memoryview]:
    return memoryview(bytearray(3)), memoryview(bytearray(7))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as running:
        yield running


@pytest.fixture
def store(server: RunningServer) -> Iterator[CacheServer]:
    found = CacheServer(server.url, KEY, expire_s=60)
    yield found
    found.close()


def test_an_object_is_read_as_it_was_stored(store: CacheServer) -> None:
    assert store.get(key(1), blank()) is None
    assert store.put(key(1), PIECES)
    pieces = blank()
    assert store.get(key(1), pieces) == SIZE
    assert pieces == PIECES
    assert store.put(key(1), (PIECES[0],))
    assert store.get(key(1), pieces) == 3, "it was replaced"
    assert pieces == PIECES, "and nothing is copied of an object of another size"
    store.remove(key(1))
    assert store.get(key(1), blank()) is None
    store.remove(key(1))


def test_the_parts_of_many_blocks_are_listed_in_order(
    store: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_server, "LOOKED_UP", 3)
    for number in (0, 1, 2, 5, 6):
        assert store.put(key(number), PIECES)
    assert store.put(key(6, Content.STATE), PIECES)
    blocks = [key(number).block for number in range(8)]
    pages = [list(parts) for parts in store.parts(blocks, Content.PAGE)]
    assert [bool(parts) for parts in pages] == [True, True, True, False, False, True, True, False]
    assert pages[0] == [PART]
    assert [list(parts) for parts in store.parts(blocks[5:7], Content.STATE)] == [[], [PART]]


def test_pools_with_other_keys_do_not_see_each_other(
    store: CacheServer, server: RunningServer
) -> None:
    assert store.put(key(1), PIECES)
    other = CacheServer(server.url, bytes(32), expire_s=60)
    assert other.get(key(1), blank()) is None
    same = CacheServer(server.url, KEY, expire_s=60)
    assert same.get(key(1), blank()) == SIZE
    other.close()
    same.close()


def test_blocks_expire_unless_they_are_used(store: CacheServer, server: RunningServer) -> None:
    for number in (1, 2):
        assert store.put(key(number), PIECES)
    with server.client() as client:
        names = list(client.scan_iter("baton:*"))
        assert [0 < client.ttl(name) <= 60 for name in names] == [True, True]
        for name in names:
            client.expire(name, 5)
        store.use([key(1), key(1, Content.STATE), key(3)])
        assert sorted(client.ttl(name) > 5 for name in names) == [False, True]


def test_a_server_that_is_away_is_left_alone_for_a_while(
    server: RunningServer,
    store: CacheServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert store.put(key(1), PIECES)
    server.kill()
    assert store.get(key(1), blank()) is None
    assert [list(parts) for parts in store.parts([key(1).block], Content.PAGE)] == [[]]
    assert not store.put(key(1), PIECES)
    assert not store.put(key(2), PIECES)
    store.use([key(1)])
    store.remove(key(1))
    warned = [record for record in caplog.records if "left alone" in record.getMessage()]
    assert len(warned) == 2, "one for reads, one for writes"
    server.start()
    assert not store.put(key(1), PIECES)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + cache_server.AVOID_S)
    assert store.put(key(1), PIECES)
    assert store.get(key(1), blank()) == SIZE


def test_a_server_that_does_not_answer_costs_one_wait(
    server: RunningServer, store: CacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_server, "SILENT_S", 0.2)
    store = CacheServer(server.url, KEY, expire_s=60)
    assert store.put(key(1), PIECES)
    server.freeze()
    try:
        assert store.get(key(1), blank()) is None
        asked = list[object]()
        monkeypatch.setattr(store, "_read", lambda *request: asked.append(request))
        assert store.get(key(1), blank()) is None
        assert asked == []
    finally:
        server.thaw()
    store.close()


def test_a_full_server_refuses_writes_and_still_answers_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(
        tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction"
    ) as full:
        store = CacheServer(full.url, KEY, expire_s=60)
        store.check()
        assert "policy noeviction" in caplog.text
        assert (store.max_bytes, store.num_bytes > 0) == (16 * MIB, True)
        large = (memoryview(bytes(MIB)),)
        stored = [store.put(key(number), large) for number in range(24)]
        assert stored[0]
        assert not stored[-1]
        assert store.get(key(0), (memoryview(bytearray(MIB)),)) == MIB
        store.close()


def test_something_else_under_the_name_is_no_object(
    store: CacheServer, server: RunningServer
) -> None:
    assert store.put(key(1), PIECES)
    with server.client() as client:
        (name,) = client.scan_iter("baton:*")
        client.hset(name, "page.0-2.0of0", b"no such rank")
        client.hset(name, b"\xff", b"no text")
        assert [list(parts) for parts in store.parts([key(1).block], Content.PAGE)] == [[PART]]
        client.delete(name)
        client.set(name, b"no hash")
    assert store.get(key(1), blank()) is None
    assert [list(parts) for parts in store.parts([key(1).block], Content.PAGE)] == [[]]


def test_a_server_with_a_password_needs_it(tmp_path: Path) -> None:
    flags = ("--requirepass", "secret", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    server = RunningServer(tmp_path / "valkey", flags, password="secret")
    server.start()
    try:
        without = CacheServer(f"unix://{server.socket_file}", KEY, expire_s=60)
        assert not without.put(key(1), PIECES)
        store = CacheServer(server.url, KEY, expire_s=60)
        assert store.put(key(1), PIECES)
        for each in (without, store):
            each.close()
    finally:
        server.kill()


def test_the_password_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = CacheServer("redis://someone:secret@127.0.0.1:1/0", KEY, expire_s=60)
    assert not store.put(key(1), PIECES)
    assert "127.0.0.1:1" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(ConfigError) as refused:
        CacheServer("redis://someone:secret@", KEY, expire_s=60)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:6379", "is not redis://HOST:PORT"),
        ("http://host:80", "is not redis://HOST:PORT"),
        ("redis://", "is not redis://HOST:PORT"),
        ("redis://host:port", "is not redis://HOST:PORT"),
        ("redis://[::1", "is not redis://HOST:PORT"),
        ("redis://host:1/x", "is not redis://HOST:PORT"),
        ("redis://host:1?socket_timeout=1000", "has the options socket_timeout"),
    ],
)
def test_other_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        CacheServer(url, KEY, expire_s=60)
    assert refused.value.field == "cache_server"


def test_tls_needs_the_authority_that_is_named(tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:1?ssl_ca_certs={tmp_path / 'missing'}"
    with pytest.raises(ConfigError, match=r"ssl_ca_certs .*missing is no file"):
        CacheServer(url, KEY, expire_s=60)
