"""Invalid input is refused with its field and limit and leaks nothing on any worker."""

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from baton.values import Query, Sampling, Stop
from runtime.errors import BatonError, InvalidRequestError, UnavailableError, UnknownModelError
from tests.support.cluster.clusters import RunningCluster, running_cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(checkpoint: Path) -> AsyncIterator[RunningCluster]:
    async with running_cluster(checkpoint, decode_pp=2) as cluster:
        yield cluster


REFUSED = [
    (Query(prompt=()), "token_ids.ids", "empty"),
    (Query(prompt=(5, 300)), "token_ids.ids[1]", "257"),
    (Query(prompt=tuple([5] * 513)), "token_ids", "512"),
    (Query(prompt=(5,), stop=Stop(max_tokens=0)), "stop.max_tokens", "at least 1"),
    (Query(prompt=(5,), stop=Stop(max_tokens=2, min_tokens=3)), "stop.min_tokens", "max_tokens"),
    (Query(prompt=(5,), stop=Stop(strings=("x",)), skip_text=True), "stop.stop_strings", ""),
    (Query(prompt=(5,), stop=Stop(token_ids=(999,))), "stop.stop_token_ids", "257"),
    (Query(prompt=(5,), sampling=Sampling(temperature=math.nan)), "sampling.temperature", ""),
    (Query(prompt=(5,), sampling=Sampling(temperature=-1.0)), "sampling.temperature", ""),
    (Query(prompt=(5,), sampling=Sampling(top_p=0.0)), "sampling.top_p", ""),
    (
        Query(prompt=(5,), sampling=Sampling(repetition_penalty=0.0)),
        "sampling.repetition_penalty",
        "",
    ),
    (Query(prompt=(5,), sampling=Sampling(logit_bias={257: 1.0})), "sampling.logit_bias", "257"),
    (Query(prompt=(5,), num_top_logprobs=21), "num_top_logprobs", "20"),
    (Query(prompt=(5,), priority=101), "priority", "100"),
    (Query(prompt=(5,), request_id="x" * 129), "request_id", "128"),
    (Query(prompt="text without a tokenizer"), "text", "tokenizer"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("query", "field", "limit"),
    REFUSED,
    ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(REFUSED)],
)
async def test_refused_by_field(
    running: RunningCluster, query: Query, field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await running.client.complete(query, timeout_s=60)
    assert any(violation.field.startswith(field) for violation in refused.value.violations), (
        refused.value
    )
    assert limit in str(refused.value)
    await running.until_clean()


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_model(running: RunningCluster) -> None:
    with pytest.raises(UnknownModelError):
        await running.client.complete(Query(prompt=(5,), model="gpt-42"), timeout_s=60)


@pytest.mark.asyncio(loop_scope="module")
async def test_garbage_on_every_port_disturbs_no_request(running: RunningCluster) -> None:
    rng = random.Random(0)
    ports = {
        connection.laddr.port
        for process in running.cluster.processes.values()
        if process.pid
        for connection in psutil.Process(process.pid).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(ports) >= 2 * len(running.cluster.processes), "gRPC, metrics and UCX ports"
    for port in ports:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(4096), b"\0" * 65536):
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 5)
                writer.write(garbage)
                await asyncio.wait_for(writer.drain(), 5)
                writer.close()
            except OSError:
                continue  # hung up on us: fine
    pids = {name: process.pid for name, process in running.cluster.processes.items()}
    for _ in range(3):
        completion = await running.client.complete(
            Query(prompt=(5, 6, 7), skip_text=True, stop=Stop(max_tokens=4)), timeout_s=60
        )
        assert completion.token_ids
    assert pids == {name: process.pid for name, process in running.cluster.processes.items()}
    await running.until_clean()


async def test_pools_of_different_geometry_are_never_paired(
    checkpoint: Path, tmp_path: Path
) -> None:
    """And waited for no longer than it takes to see that."""
    config = tmp_path / "baton.toml"
    config.write_text("[prefill]\npage_size = 16\n[decode]\npage_size = 64\n")
    with pytest.raises(
        UnavailableError, match="router: its workers serve, but are incompatible"
    ) as failed:
        async with running_cluster(checkpoint, worker_flags=("--config", os.fspath(config))):
            pass
    assert "they differ in page size (16 here, 64 there)" in str(failed.value)


async def test_a_worker_that_cannot_start_gives_its_reason_in_one_line(checkpoint: Path) -> None:
    with pytest.raises(
        BatonError, match="9 pipeline stages need at least 9 layers, the model has 4"
    ):
        async with running_cluster(checkpoint, decode_pp=9):
            pass
