"""The same answer from every topology: clusters against one process, tokens and logprobs bit for bit."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.conftest import Reference
from tests.support.clusters import running_cluster
from tests.support.one_process import cluster_in_process
from tests.support.questions import as_query, make_questions, shown

Shown = list[tuple[int, float | None]]


def on_the_wire(answers: list[Shown]) -> list[Shown]:
    """Logprobs rounded to the 32 bits they have in the API."""
    return [[(token, None if logprob is None else float(np.float32(logprob))) for token, logprob in answer]
            for answer in answers]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Shown]:
    return on_the_wire(reference.answers(make_questions(8)))


@pytest.mark.parametrize("decode_pp", [1, 2, 3, 4])
@pytest.mark.parametrize("prefill_pp", [1, 2, 3, 4])
async def test_every_split_gives_the_same_bits_s0_7_s4_9(checkpoint: Path, expected: list[Shown], prefill_pp: int,
                                                         decode_pp: int) -> None:
    chunk = 64 if (prefill_pp + decode_pp) % 2 else 128
    async with cluster_in_process(checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp,
                                  chunk_tokens=chunk) as client:
        queries = [as_query(question) for question in make_questions(8)]
        alone = [shown(await client.complete(query, timeout_s=60)) for query in queries[:2]]
        together = await asyncio.gather(*(client.complete(query, timeout_s=60) for query in queries))
        assert alone == expected[:2]
        assert [shown(completion) for completion in together] == expected


@pytest.mark.parametrize(("partitions", "transport"), [(("3,1", "1,2,1"), "tcp"), (("", ""), "shm")])
async def test_processes_of_their_own_give_the_same_bits(checkpoint: Path, expected: list[Shown],
                                                         partitions: tuple[str, str], transport: str) -> None:
    async with running_cluster(checkpoint, prefill_pp=2, decode_pp=3, prefill_partition=partitions[0],
                               decode_partition=partitions[1], worker_flags=("--transport", transport)) as running:
        completions = await asyncio.gather(*(running.client.complete(as_query(question), timeout_s=60)
                                             for question in make_questions(8)))
        assert [shown(completion) for completion in completions] == expected
        await running.until_clean()
