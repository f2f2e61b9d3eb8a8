"""Warm responses equal cold ones, bit for bit: whole clusters against one process without a
cache."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import pytest
import torch

from baton.client import AsyncBatonClient
from baton.values import Completion
from engine.core.request import Request, SamplingParams
from router.request import timeline
from runtime.process.announce import Announcement, read_announcement
from tests.support.cluster.clusters import scrape
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.grids import mostly_long
from tests.support.models.checkpoints import add_nextn, make_checkpoint

PAGE, CHUNK = 16, 64
MAX_ROUNDS = 20
ROOT = random.Random(5).choices(range(3, 256), k=330)


def question(name: str, prompt: list[int], *, is_sampled: bool = False) -> Request:
    params = (
        SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.1, seed=7)
        if is_sampled
        else (SamplingParams(temperature=0.0))
    )
    return Request(name, tuple(prompt), 8, params, num_top_logprobs=0)


# By turns: nothing is there; the same again; a longer one; one that parts in the middle of a page,
# then at its end; a shorter one; one whose last token is the first behind a page. What is reused:
# of pages of 16; and where there are states, too, of those at the ends of prompts and where prompts
# part: on a grid of 64, or of windows at any page.
TURNS = (
    (question("cold", ROOT[:200]), 0, 0, 0),
    (question("again", ROOT[:200]), 192, 192, 192),
    (question("longer", ROOT[:300], is_sampled=True), 192, 192, 192),
    (question("parted", [*ROOT[:155], *ROOT[3:80]]), 144, 0, 0),
    (question("parted at a page", [*ROOT[:160], *ROOT[5:80]], is_sampled=True), 160, 128, 144),
    (question("shorter", ROOT[:97]), 96, 0, 0),
    (question("whole pages", ROOT[:96]), 80, 64, 0),
)
OF_PAGES, OF_STATES, OF_WINDOWS = range(3)
# Of which nothing is there: one of them computes what they have in common.
AT_ONCE = tuple(
    question(f"at once {i}", [*ROOT[40:330], i, *ROOT[:i]], is_sampled=bool(i % 2))
    for i in range(5)
)
QUESTIONS = (*(turn for turn, *_ in TURNS), *AT_ONCE)


class Retries(logging.Handler):
    """The reasons for which the router retries requests while this handler is entered."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "retried":
            self.reasons.append(vars(record)["reason"])

    def __enter__(self) -> Self:
        timeline.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        timeline.logger.removeHandler(self)


async def ask(client: AsyncBatonClient, request: Request) -> Completion:
    """Return the response to a request that did not start over.

    A prompt that starts over finds what it has computed itself before, so that no count of reused
    tokens is as expected. No worker fails here: a retry means that this machine stood still.

    Raises:
        TimeoutError: The router retried a request meanwhile.
    """
    with Retries() as retries:
        completion = await client.complete(as_query(request), timeout_s=60)
    if retries.reasons:
        raise TimeoutError(f"{request.request_id} started over: {'; '.join(retries.reasons)}")
    return completion


async def counter(metrics_port: int | None, family: str) -> float:
    assert metrics_port is not None
    return (await asyncio.to_thread(scrape, metrics_port))[family]


ReusedTokens = Callable[[], Awaitable[float]]
"""Of the decode pool's counter: prompt tokens whose pages did not cross."""


def reused_tokens(metrics_port: int | None) -> ReusedTokens:
    return partial(counter, metrics_port, "baton_cache_reused_tokens")


async def check(
    client: AsyncBatonClient,
    expected: dict[str, Shown],
    reused: ReusedTokens,
    *,
    kind: int = OF_PAGES,
) -> None:
    for turn, *there in TURNS:
        before = await reused()
        completion = await ask(client, turn)
        assert completion.finish.usage.cached_tokens == there[kind], turn.request_id
        assert await reused() - before == there[OF_PAGES], (
            f"{turn.request_id}: states come with each prompt"
        )
        assert shown(completion) == expected[turn.request_id], turn.request_id
    together = await asyncio.gather(*(ask(client, turn) for turn in AT_ONCE))
    if kind == OF_PAGES:
        assert sorted(completion.finish.usage.cached_tokens for completion in together) == [
            0,
            288,
            288,
            288,
            288,
        ]
    for completion, turn in zip(together, AT_ONCE, strict=True):
        assert shown(completion) == expected[turn.request_id], turn.request_id


def answers_of(checkpoint: Path, requests: Sequence[Request]) -> dict[str, Shown]:
    """Return the output by request id."""
    return dict(
        zip(
            [turn.request_id for turn in requests],
            on_the_wire(Reference(checkpoint).answers(list(requests))),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("family", "dtype", "prefill_pp", "decode_pp"),
    mostly_long(
        [
            ("llama", torch.float32, 1, 1),
            ("llama", torch.bfloat16, 2, 1),
            ("qwen3_moe", torch.float32, 1, 2),
            ("deepseek_v3", torch.float32, 3, 1),
            ("glm_moe_dsa_short", torch.float32, 2, 2),
            ("glm_moe_dsa_short", torch.bfloat16, 1, 1),
            ("qwen3_5_text", torch.float32, 1, 1),
            ("qwen3_5_text", torch.bfloat16, 2, 3),
            ("kimi_linear", torch.bfloat16, 3, 1),
            ("gemma3", torch.bfloat16, 2, 2),
        ],
        kept=[
            ("llama", torch.float32, 1, 1),
            ("glm_moe_dsa_short", torch.bfloat16, 1, 1),
            ("qwen3_5_text", torch.bfloat16, 2, 3),
            ("gemma3", torch.bfloat16, 2, 2),
        ],
    ),
)
async def test_warm_responses_equal_cold_ones(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    prefill_pp: int,
    decode_pp: int,
) -> None:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), family, dtype=dtype)
    expected = answers_of(checkpoint, QUESTIONS)
    async with cluster_in_process(
        checkpoint,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        num_pages=200,
        announced=tmp_path,
    ) as client:
        kind = (
            OF_STATES
            if family.startswith(("qwen3_5", "kimi"))
            else OF_WINDOWS
            if family == "gemma3"
            else OF_PAGES
        )
        await check(client, expected, of_decode(tmp_path), kind=kind)


def announced_as(folder: Path, name: str) -> Announcement:
    announcement = read_announcement(folder / f"{name}.json")
    assert announcement is not None
    return announcement


def of_decode(folder: Path) -> ReusedTokens:
    return reused_tokens(announced_as(folder, "decode-0").metrics_port)


async def converse(
    client: AsyncBatonClient, reference: Reference, reused: ReusedTokens
) -> list[float]:
    """Continue each turn from the previous output; return the tokens each found on the decode
    pool."""
    prompt, found = ROOT[:150], []
    for number in range(4):
        turn = replace(
            question(f"turn {number}", prompt, is_sampled=bool(number % 2)), max_tokens=41
        )
        (expected,) = on_the_wire(reference.answers([turn]))
        before = await reused()
        completion = await ask(client, turn)
        assert shown(completion) == expected, turn.request_id
        found.append(await reused() - before)
        prompt = [*prompt, *(token for token, _ in expected), *ROOT[10 * number : 10 * number + 9]]
    return found


@pytest.mark.parametrize(
    ("family", "decode_pp", "found"),
    [("glm_moe_dsa_short", 2, [0, 176, 240, 288]), ("qwen3_5_text", 2, [0, 144, 192, 240])],
)
async def test_an_output_is_cached_for_the_next_turn(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    family: str,
    decode_pp: int,
    found: list[int],
) -> None:
    """Prompts of 150, 200, 250 and 300 tokens, of which 41 at a time are an output whose last token
    was never computed. Recurrent layers decode with other bits than they prefill with: for them
    only prompts are cached."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), family)
    async with cluster_in_process(
        checkpoint,
        decode_pp=decode_pp,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        num_pages=200,
        announced=tmp_path,
    ) as client:
        assert await converse(client, Reference(checkpoint), of_decode(tmp_path)) == found


@pytest.mark.parametrize(("family", "decode_pp"), [("llama", 1), ("glm_moe_dsa_short", 2)])
async def test_a_pool_that_has_nearly_all_computes_the_rest(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str, decode_pp: int
) -> None:
    """Its router knows what it holds by reports, four a second: it may be too early to know."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), family)
    reference = Reference(checkpoint)
    async with cluster_in_process(
        checkpoint,
        decode_pp=decode_pp,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        num_pages=200,
        announced=tmp_path,
        decode={"local_rest_tokens": 32},
    ) as client:
        port = announced_as(tmp_path, "decode-0").metrics_port
        for number in range(MAX_ROUNDS):
            opening = replace(
                question(f"opening {number}", ROOT[number : number + 150]), max_tokens=41
            )
            (first,) = on_the_wire(reference.answers([opening]))
            assert shown(await ask(client, opening)) == first
            turn = question(
                f"next {number}",
                [*opening.prompt_token_ids, *(token for token, _ in first), 7, 8, 9],
                is_sampled=True,
            )
            (expected,) = on_the_wire(reference.answers([turn]))
            await asyncio.sleep(0.2 * number)
            before = await counter(port, "baton_local_prefill")
            completion = await ask(client, turn)
            assert shown(completion) == expected
            if await counter(port, "baton_local_prefill") > before:
                break
        assert completion.finish.usage.cached_tokens == 176, "18 of 194 tokens are computed"


async def test_an_operator_empties_the_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """While a prompt that goes on from it is under way, too; what it leaves is there for the next
    one."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), "qwen3_5_text")
    turn = replace(TURNS[0][0], max_tokens=40)
    async with cluster_in_process(
        checkpoint, page_size=PAGE, chunk_tokens=CHUNK, num_pages=200
    ) as client:
        cold = await ask(client, turn)
        again = asyncio.create_task(ask(client, turn))
        flushed = await client.flush_caches()
        assert sorted((each.role, each.error) for each in flushed) == [
            ("decode", ""),
            ("prefill", ""),
        ]
        assert [each.pages for each in flushed] == [12, 12]
        assert shown(await again) == shown(cold)
        await client.flush_caches()
        for cached_tokens in (0, 192):
            after = await ask(client, turn)
            assert (after.finish.usage.cached_tokens, shown(after)) == (cached_tokens, shown(cold))


async def test_with_a_draft_that_reads_prompts(tmp_path: Path) -> None:
    """Drafts on both sides, layers that share their selected keys."""
    checkpoint = add_nextn(
        make_checkpoint(tmp_path, "glm_moe_dsa_short"),
        tmp_path / "model",
        index_share_for_mtp_iteration=True,
    )
    expected = answers_of(checkpoint, QUESTIONS)
    async with cluster_in_process(
        checkpoint,
        prefill_pp=2,
        decode_pp=2,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        draft=checkpoint,
        spec_steps=3,
        spec_draft_tokens=3,
        spec_adaptive=False,
        num_pages=200,
        announced=tmp_path,
    ) as client:
        reused = of_decode(tmp_path)
        await check(client, expected, reused)
        found = await converse(client, Reference(checkpoint), reused)
        assert all(held >= least for held, least in zip(found[1:], [176, 224, 272], strict=True)), (
            found
        )


@pytest.mark.parametrize(
    ("prefill", "decode", "max_tokens"),
    [
        ({"num_pages": 40, "max_running": 3}, {"num_pages": 200}, 8),
        ({"num_pages": 200}, {"num_pages": 30}, 40),
    ],
)
async def test_a_pool_short_of_pages_evicts_unused_ones(
    tmp_path_factory: pytest.TempPathFactory,
    prefill: dict[str, int],
    decode: dict[str, int],
    max_tokens: int,
) -> None:
    """Requests that are dropped in mid-stream included; a decode pool sets others back and reads
    them again, and refuses those for which the router believed that it has room."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), "llama")
    prompts = [
        replace(
            question(f"q{i}", [*ROOT[: 40 * (i % 3)], *ROOT[i : i + 150]]), max_tokens=max_tokens
        )
        for i in range(6)
    ]
    expected = on_the_wire(Reference(checkpoint).answers(prompts))
    async with cluster_in_process(
        checkpoint,
        page_size=PAGE,
        chunk_tokens=CHUNK,
        max_context=300,
        prefill=prefill,
        decode=decode,
    ) as client:

        async def complete(request: Request) -> Completion:
            return await client.complete(as_query(request), timeout_s=60)

        async def drop(request: Request) -> None:
            async with asyncio.timeout(0.02 * len(request.request_id)):
                await complete(replace(request, request_id=f"{request.request_id}, dropped"))

        for _ in range(2):
            dropped = [asyncio.create_task(drop(request)) for request in prompts[::3]]
            answers = await asyncio.gather(*map(complete, prompts))
            await asyncio.gather(*dropped, return_exceptions=True)
            assert [shown(answer) for answer in answers] == expected
