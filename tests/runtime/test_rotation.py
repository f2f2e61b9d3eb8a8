"""Certificates that are replaced while a server runs."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.errors import UnavailableError
from runtime.rpc.client import open_channel, open_sync_channel
from runtime.security.access import ChannelSecurity, PeerRole, ServerSecurity
from runtime.security.certificates import CertificateStore, TlsFiles
from tests.support.network.authority import Authority, write
from tests.support.network.door import ask, plain_client, serving


class Rotation:
    """Replaces the files of a server and of its client by those of another authority, both trusted
    for a while."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = Authority("old"), Authority("new")
        self.server, self.client = folder / "server", folder / "client"
        self.first = self.old.issue("prefill")
        self.second = self.new.issue("prefill")
        self.client_second = self.new.issue("router")
        write(self.server, self.old.pem, self.first)
        write(self.client, self.old.pem, self.old.issue("router"))

    def stores(self) -> tuple[CertificateStore, CertificateStore]:
        """Return the stores of server and client."""
        server, client = (
            CertificateStore(TlsFiles(folder / "ca.pem", folder / "cert.pem", folder / "key.pem"))
            for folder in (self.server, self.client)
        )
        return server, client

    def steps(self) -> Iterator[None]:
        """Yield the documented steps: trust both, change the certificates, trust the new one
        only."""
        both = self.old.pem + self.new.pem
        (self.server / "ca.pem").write_bytes(both)
        (self.client / "ca.pem").write_bytes(both)
        yield
        write(self.client, both, self.client_second)
        yield
        write(self.server, both, self.second)
        yield
        (self.server / "ca.pem").write_bytes(self.new.pem)
        (self.client / "ca.pem").write_bytes(self.new.pem)
        yield


async def served_serial(address: str) -> int:
    """Return the serial of the certificate that new connections see."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(der).serial_number


async def test_rotation_under_load_fails_nothing(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path)
    server_store, client_store = rotation.stores()
    security = ChannelSecurity(client_store).to(PeerRole.PREFILL)
    answered, stop = [0], asyncio.Event()

    async def load(channel: grpc.aio.Channel) -> None:
        while not stop.is_set():
            assert await ask(channel) == "echo"
            answered[0] += 1

    async def answered_more(count: int) -> None:
        target = answered[0] + count
        while answered[0] < target:  # noqa: ASYNC110 (what the other tasks count)
            await asyncio.sleep(0.005)

    async with (
        serving(ServerSecurity(server_store)) as address,
        open_channel(address, security=security) as channel,
        asyncio.timeout(55),
    ):  # the prompt that hangs does so for a minute
        assert await served_serial(address) == rotation.first.serial_number
        held = generation_pb2_grpc.GenerationStub(channel).Generate(pb.GenerateRequest(text="hang"))
        await held.read()
        tasks = [asyncio.create_task(load(channel)) for _ in range(3)]
        for _ in rotation.steps():
            await answered_more(20)
        assert await served_serial(address) == rotation.second.serial_number
        shown = await anext(
            aiter(worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()))
        )
        assert shown.info.incarnation == str(rotation.client_second.serial_number)
        stop.set()
        await asyncio.gather(*tasks)
        assert not held.done(), "the stream that began before the rotation still runs"
        held.cancel()
        old = rotation.old.issue("router")
        async with plain_client(address, rotation.new.pem, old.key, old.certificate) as outdated:
            with pytest.raises(UnavailableError):
                await ask(outdated)


async def test_threads_rotate_too(tmp_path: Path) -> None:
    rotation = Rotation(tmp_path)
    server_store, client_store = rotation.stores()
    security = ChannelSecurity(client_store).to(PeerRole.PREFILL)
    async with serving(ServerSecurity(server_store)) as address:

        def run() -> list[str]:
            with open_sync_channel(address, security=security) as channel:
                stub = generation_pb2_grpc.GenerationStub(channel)
                held = stub.Generate(pb.GenerateRequest(text="first hang"))
                seen = [next(held).chunk.text]
                for _ in rotation.steps():
                    seen.append(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).model)
                seen.append(next(held).chunk.text)
                held.cancel()
                shown = next(worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest()))
                return [*seen, shown.info.incarnation]

        assert await asyncio.to_thread(run) == [
            "first ",
            "echo",
            "echo",
            "echo",
            "echo",
            "hang ",
            str(rotation.client_second.serial_number),
        ]


async def test_half_a_pair_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "router")
    store = CertificateStore(files)
    first, second = store.current(), authority.issue("router")
    assert files.cert is not None
    assert files.key is not None
    files.cert.write_bytes(second.certificate)
    assert store.current() is first
    assert store.current() is first
    assert [
        record.levelname for record in caplog.records if record.name.startswith("runtime.")
    ] == ["WARNING"]
    files.key.write_bytes(second.key)
    assert (store.current().cert, store.current().key) == (second.certificate, second.key)


def test_a_store_may_be_read_by_many_threads(tmp_path: Path) -> None:
    authority = Authority()
    files = authority.files(tmp_path, "router")
    store, problems = CertificateStore(files), list[BaseException]()

    def read() -> None:
        try:
            for _ in range(200):
                store.current()
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        write(tmp_path, authority.pem, authority.issue("router"))
    for thread in threads:
        thread.join()
    assert problems == []
