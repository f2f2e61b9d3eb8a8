"""Sides of `bench.mixed`: a server each, and its responses as a client receives them."""

import asyncio
import contextlib
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from baton.client import AsyncBatonClient
from baton.cluster_config import ClusterConfig
from baton.values import Chunk, Query, Sampling, Stop
from bench.command import running_cluster
from runtime.errors import BatonError, UnavailableError

TIMEOUT_S = 600.0
START_S = 600.0
MAX_CONTEXT = 4096


class MixedSide(Protocol):
    def generate(self, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[int, None]:
        """Yield the number of tokens of each arrival.

        Closing the generator early aborts the request. Raises BatonError.
        """
        ...


class BatonSide:
    def __init__(self, client: AsyncBatonClient) -> None:
        self._client = client

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[int, None]:
        query = Query(
            tuple(prompt),
            Sampling(temperature=0),
            Stop(max_tokens=max_tokens, ignore_eos=True),
            skip_text=True,
        )
        async with contextlib.aclosing(self._client.generate(query, timeout_s=TIMEOUT_S)) as events:
            async for event in events:
                if isinstance(event, Chunk) and event.token_ids:
                    yield len(event.token_ids)


@asynccontextmanager
async def baton_side(model: Path, *, memory_mb: int) -> AsyncIterator[BatonSide]:
    """Run a prefill and a decode worker, on the first and second core of this process.

    The router shares the first core.
    """
    config = ClusterConfig(
        model=model,
        memory_mb=memory_mb,
        max_context=MAX_CONTEXT,
        listen="127.0.0.1:0",
        log_level="warning",
    )
    async with running_cluster(config) as (_, client):
        yield BatonSide(client)


class VllmSide:
    """vLLM's engine in a process of `bench/peer_vllm.py`.

    There is no HTTP server in between: the engine is measured at its best.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers: dict[str, asyncio.Queue[int | None]] = {}
        self._num_requests = 0

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> AsyncGenerator[int, None]:
        self._num_requests += 1
        name = str(self._num_requests)
        answer = self._answers[name] = asyncio.Queue()
        self._send(do="add", name=name, prompt=list(prompt), max_tokens=max_tokens)
        left = max_tokens
        try:
            while left:
                count = await asyncio.wait_for(answer.get(), TIMEOUT_S)
                if count is None:
                    raise UnavailableError("vLLM's process has ended")
                left -= count
                yield count
        finally:
            del self._answers[name]
            if left:
                self._send(do="abort", name=name)

    async def read(self) -> None:
        """Distribute the output of the process until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            for name, count in json.loads(line).items():
                if name in self._answers:
                    self._answers[name].put_nowait(count)
        for answer in self._answers.values():
            answer.put_nowait(None)

    def _send(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")


@asynccontextmanager
async def vllm_side(
    python: Path,
    model: Path,
    *,
    cores: Sequence[int],
    memory_mb: int,
    chunk_tokens: int,
    max_requests: int,
) -> AsyncIterator[VllmSide]:
    """Run vLLM on all of `cores`, or raise BatonError if it does not start."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, memory_mb // 1024)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    program = Path(__file__).with_name("peer_vllm.py")
    process = await asyncio.create_subprocess_exec(
        python,
        "-P",
        program,
        "streams",
        model,
        str(max_requests),
        str(chunk_tokens),
        stdin=PIPE,
        stdout=PIPE,
        env={**plain, **settings},
        limit=2**20,
    )
    try:
        assert process.stdout is not None
        if not await asyncio.wait_for(process.stdout.readline(), START_S):
            raise BatonError(f"vLLM's process ended with status {await process.wait()}")
        side = VllmSide(process)
        reading = asyncio.create_task(side.read())
        yield side
        reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
