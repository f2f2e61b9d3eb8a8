"""A whole cluster under mutual TLS, with a token for clients: it serves them and refuses all
others."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.roles import set_roles
from baton.values import Query, Sampling, Stop
from engine.core.request import Request, SamplingParams
from protos import decode_pb2_grpc, lending_pb2_grpc, pipeline_pb2_grpc, prefill_pb2_grpc
from runtime.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import ChannelSecurity
from runtime.security.tokens import OwnToken
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.reference import Reference
from tests.support.network.authority import Authority, write

PROMPT, NUM_TOKENS = tuple(range(3, 100)), 12
QUERY = Query(
    prompt=PROMPT,
    sampling=Sampling(temperature=0),
    stop=Stop(max_tokens=NUM_TOKENS),
    skip_text=True,
)
ROLES = ("router", "prefill", "decode")


def settings(folder: Path, authority: Authority, tokens: Path) -> Path:
    """Write the configuration file of all roles and the files it names."""
    lines = []
    for role in (*ROLES, "worker"):
        names = ("prefill", "decode") if role == "worker" else (role,)
        files = authority.files(folder / role, *names)
        lines += [
            f"[{role}]",
            f'tls_ca = "{files.ca}"',
            f'tls_cert = "{files.cert}"',
            f'tls_key = "{files.key}"',
        ]
        lines += [f'token_file = "{tokens}"'] if role == "router" else []
    path = folder / "baton.toml"
    path.write_text("\n".join(lines))
    return path


async def refusal(call: "grpc.aio.StreamStreamCall") -> Exception:  # type: ignore[type-arg]
    """Return the error of an unauthorized stream.

    Nothing is sent: gRPC reports a message that comes too late as an error of its own.
    """
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return error_from_rpc(refused.value)


async def test_a_cluster_under_mutual_tls_and_tokens(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    old, new = Authority("old"), Authority("new")
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test\n")
    config = settings(tmp_path, old, token)
    operator = ChannelSecurity(old.store(tmp_path / "operator", "operator"))
    client_files = old.store(tmp_path / "client", "client")
    client = ChannelSecurity(client_files, OwnToken(token))
    flags = ("--config", str(config))
    async with running_cluster(
        checkpoint,
        decode_pp=2,
        worker_flags=flags,
        router_flags=flags,
        security=operator,
        client_security=client,
    ) as running:
        ((*expected,),) = reference.answers(
            [Request("r", PROMPT, NUM_TOKENS, SamplingParams(temperature=0))]
        )
        answer = await running.client.complete(QUERY, timeout_s=60)
        assert list(answer.token_ids) == [token_id for token_id, _ in expected]

        async with AsyncBatonClient(
            running.cluster.address, security=ChannelSecurity(client_files)
        ) as tokenless:
            with pytest.raises(UnauthenticatedError):
                await tokenless.complete(QUERY, timeout_s=60)
        async with AsyncBatonClient(running.cluster.address) as in_the_clear:
            with pytest.raises(UnavailableError):
                await in_the_clear.complete(QUERY, timeout_s=60)
        addresses = {
            name: process.announcement.address
            for name, process in running.cluster.processes.items()
            if process.announcement is not None
        }
        prefill = ChannelSecurity(client_files, server_name="prefill")
        async with open_channel(addresses["prefill-0"], security=prefill) as channel:
            run = prefill_pb2_grpc.PrefillStub(channel).Serve(wait_for_ready=True)
            assert isinstance(await refusal(run), PermissionDeniedError)
        decode = ChannelSecurity(client_files, server_name="decode")
        async with open_channel(addresses["decode-0.0"], security=decode) as channel:
            generate = decode_pb2_grpc.DecodeStub(channel).Serve(wait_for_ready=True)
            assert isinstance(await refusal(generate), PermissionDeniedError)
            join = pipeline_pb2_grpc.PipelineStub(channel).Join(wait_for_ready=True)
            assert isinstance(await refusal(join), PermissionDeniedError)

        await rotate_under_load(
            running.client, [token_id for token_id, _ in expected], tmp_path, old, new
        )
        await running.until_clean()


async def test_a_worker_of_both_roles_shows_both_and_an_operator_switches_it(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    authority = Authority("one")
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test\n")
    flags = ("--config", str(settings(tmp_path, authority, token)))
    operator = ChannelSecurity(authority.store(tmp_path / "operator", "operator"))
    client_files = authority.store(tmp_path / "client", "client")
    async with running_cluster(
        checkpoint,
        prefill=0,
        decode=0,
        worker=1,
        worker_pp=2,
        worker_flags=flags,
        router_flags=flags,
        security=operator,
        client_security=ChannelSecurity(client_files, OwnToken(token)),
    ) as running:
        ((*expected,),) = reference.answers(
            [Request("r", PROMPT, NUM_TOKENS, SamplingParams(temperature=0))]
        )
        answer = await running.client.complete(QUERY, timeout_s=60)
        assert list(answer.token_ids) == [token_id for token_id, _ in expected]
        announcement = running.cluster.processes["worker-0.0"].announcement
        assert announcement is not None
        with pytest.raises(PermissionDeniedError):
            await set_roles(announcement.address, ["decode"], ChannelSecurity(client_files))
        assert await set_roles(announcement.address, ["decode"], operator) == ("decode",)
        both = ["decode", "prefill"]
        assert await set_roles(announcement.address, both, operator) == ("prefill", "decode")
        with pytest.raises(InvalidRequestError, match="roles: must be among prefill, decode"):
            await set_roles(announcement.address, ["router"], operator)
        answer = await running.client.complete(QUERY, timeout_s=60)
        assert list(answer.token_ids) == [token_id for token_id, _ in expected]
        await running.until_clean()


async def rotate_under_load(
    client: AsyncBatonClient, expected: list[int], folder: Path, old: Authority, new: Authority
) -> None:
    """Replace every certificate by one of another authority while requests run; all of them
    succeed."""
    both, people = old.pem + new.pem, ("client", "operator")
    answered, is_over = [0], asyncio.Event()

    async def load() -> None:
        while not is_over.is_set():
            assert list((await client.complete(QUERY, timeout_s=60)).token_ids) == expected
            answered[0] += 1

    async def two_more() -> None:
        target = answered[0] + 2
        while answered[0] < target and not all(task.done() for task in tasks):  # noqa: ASYNC110 (what the tasks count)
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(load()) for _ in range(2)]
    for name in (*ROLES, *people):
        (folder / name / "ca.pem").write_bytes(both)
    await two_more()
    for names in (people, ROLES[:1], ROLES[1:]):
        for name in names:
            write(folder / name, both, new.issue(name))
        await two_more()
    for name in (*ROLES, *people):
        (folder / name / "ca.pem").write_bytes(new.pem)
    await two_more()
    is_over.set()
    await asyncio.gather(*tasks)
    assert answered[0] >= 2 * 5


async def test_workers_pull_from_each_other_and_clients_do_not(
    checkpoint: Path, reference: Reference, tmp_path: Path
) -> None:
    authority = Authority("one")
    token = tmp_path / "token"
    token.write_text("the-token-of-this-test\n")
    flags = ("--config", str(settings(tmp_path, authority, token)))
    client_files = authority.store(tmp_path / "client", "client")
    pulls = ("--policy", "round_robin", "--pull-tokens", "1")
    prompt = tuple(range(3, 203))
    async with running_cluster(
        checkpoint,
        prefill=2,
        worker_flags=flags,
        router_flags=(*flags, *pulls),
        security=ChannelSecurity(authority.store(tmp_path / "operator", "operator")),
        client_security=ChannelSecurity(client_files, OwnToken(token)),
    ) as running:
        ((*expected,),) = reference.answers(
            [Request("r", prompt, NUM_TOKENS, SamplingParams(temperature=0))]
        )
        for num_cached in (0, 192):
            answer = await running.client.complete(replace(QUERY, prompt=prompt), timeout_s=60)
            assert list(answer.token_ids) == [token_id for token_id, _ in expected]
            assert answer.finish.usage.cached_tokens == num_cached
            await asyncio.sleep(1.0)  # four reports of the caches to the router
        announcement = running.cluster.processes["prefill-0"].announcement
        assert announcement is not None
        prefill = ChannelSecurity(client_files, server_name="prefill")
        async with open_channel(announcement.address, security=prefill) as channel:
            lend = lending_pb2_grpc.LendingStub(channel).Lend(wait_for_ready=True)
            assert isinstance(await refusal(lend), PermissionDeniedError)
        await running.until_clean()
