"""A Kubernetes API server that knows EndpointSlices only: real HTTP and TLS, lists and watches as
the real one."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from runtime.config import parse_address

PATH = "/apis/discovery.k8s.io/v1/namespaces/baton/endpointslices"
Conditions = dict[str, bool]
READY: Conditions = {"ready": True, "serving": True, "terminating": False}


def endpoint_slice(
    name: str, service: str, *endpoints: tuple[str, Conditions], port: int = 7000
) -> dict[str, Any]:
    """Return a slice as in the API; `endpoints` are addresses with their conditions."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "name": name,
            "namespace": "baton",
            "labels": {"kubernetes.io/service-name": service},
        },
        "ports": [
            {"name": "metrics", "port": 9090, "protocol": "TCP"},
            {"name": "grpc", "port": port, "protocol": "TCP"},
        ],
        "endpoints": [
            {"addresses": [address], "conditions": conditions} for address, conditions in endpoints
        ],
    }


@dataclass(eq=False)
class FakeApi:
    """`put` and `delete` change what is there; watches hear of it. `requests` are the queries so
    far, `asked_at_s` when they came."""

    token: str = "secret-1"
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[dict[str, str]] = field(default_factory=list)
    asked_at_s: list[float] = field(default_factory=list)
    refusal: int = 0  # the status every request gets, if not 0
    port: int = 0
    _version: int = 100
    _events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # (version, event)
    _num_ended: int = 0
    _oldest: int = 0  # watches from before are Gone
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def lists(self) -> int:
        return sum("watch" not in request for request in self.requests)

    @property
    def watches(self) -> int:
        return sum("watch" in request for request in self.requests)

    def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        self._note("MODIFIED" if name in self.slices else "ADDED", item)
        self.slices[name] = item

    def put_worker(
        self, name: str, service: str, address: str, conditions: Conditions = READY
    ) -> None:
        """Add a slice for one worker of a test, which has its own port."""
        place = parse_address(address)
        self.put(endpoint_slice(name, service, (place.host, conditions), port=place.port))

    def delete(self, name: str) -> None:
        self._note("DELETED", self.slices.pop(name))

    def bookmark(self) -> None:
        self._note("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def end_watches(self) -> None:
        """End every running watch, as the server does after the time that was asked for."""
        self._num_ended += 1
        self._wake()

    def forget_history(self) -> None:
        """Answer every watch that continues from an earlier version with 410 Gone, running ones
        too."""
        self._version += 1
        self._oldest = self._version
        self._wake()

    async def start(self, security: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=security)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _note(self, kind: str, item: dict[str, Any]) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, {"type": kind, "object": item}))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                await self._answer(head, writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.split(" ")[1])
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.requests.append(query)
        self.asked_at_s.append(asyncio.get_running_loop().time())
        authorised = f"authorization: bearer {self.token}\r\n" in head.lower()
        status = self.refusal or (404 if url.path != PATH else 200 if authorised else 401)
        if status != 200:
            await _send(writer, status, {"kind": "Status", "code": status, "message": "no"})
        elif "watch" in query:
            await self._watch(query, writer)
        else:
            items = [item for item in self.slices.values() if _selected(item, query)]
            await _send(
                writer,
                200,
                {
                    "kind": "EndpointSliceList",
                    "metadata": {"resourceVersion": str(self._version)},
                    "items": items,
                },
            )

    async def _watch(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        seen, num_ended = int(query["resourceVersion"]), self._num_ended
        while num_ended == self._num_ended:
            changed = self._changed
            if seen < self._oldest:
                await _chunk(
                    writer,
                    {
                        "type": "ERROR",
                        "object": {"kind": "Status", "code": 410, "reason": "Expired"},
                    },
                )
                break
            for version, event in self._events:
                if version > seen and (
                    event["type"] == "BOOKMARK" or _selected(event["object"], query)
                ):
                    await _chunk(writer, event)
                    seen = version
            await changed.wait()
        writer.write(b"0\r\n\r\n")


def _selected(item: dict[str, Any], query: dict[str, str]) -> bool:
    label, value = query["labelSelector"].split("=")
    return bool(item["metadata"]["labels"].get(label) == value)


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    payload = json.dumps(body).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    line = json.dumps(event).encode() + b"\n"
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
    await writer.drain()


@asynccontextmanager
async def fake_api(security: ssl.SSLContext | None = None) -> AsyncIterator[FakeApi]:
    api = FakeApi()
    await api.start(security)
    try:
        yield api
    finally:
        await api.stop()
