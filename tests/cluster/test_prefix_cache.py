"""Warm answers are cold answers, bit for bit: whole clusters against one process that keeps nothing."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.client import AsyncBatonClient
from baton.values import Completion
from engine.core.request import Request, SamplingParams
from runtime.announce import read_announcement
from tests.cluster.conftest import Reference
from tests.cluster.test_equality import Shown, on_the_wire
from tests.cluster.test_metrics import scrape
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, shown
from tests.support.models.checkpoints import add_nextn, make_checkpoint

PAGE, CHUNK = 16, 64
ROOT = random.Random(5).choices(range(3, 256), k=330)


def question(name: str, prompt: list[int], *, is_sampled: bool = False) -> Request:
    params = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.1, seed=7) if is_sampled else (
        SamplingParams(temperature=0.0))
    return Request(name, tuple(prompt), 8, params, num_top_logprobs=0)


# By turns: nothing is there; the same again; a longer one; one that parts in the middle of a page, then at its end; a
# shorter one; one whose last token is the first behind a page. What is reused: of pages of 16; and where there are
# states, too, of those at the ends of prompts and where prompts part, on a grid of 64.
TURNS = (
    (question("cold", ROOT[:200]), 0, 0),
    (question("again", ROOT[:200]), 192, 192),
    (question("longer", ROOT[:300], is_sampled=True), 192, 192),
    (question("parted", [*ROOT[:155], *ROOT[3:80]]), 144, 0),
    (question("parted at a page", [*ROOT[:160], *ROOT[5:80]], is_sampled=True), 160, 128),
    (question("shorter", ROOT[:97]), 96, 0),
    (question("whole pages", ROOT[:96]), 80, 64),
)
# Of which nothing is there: one of them computes what they have in common.
AT_ONCE = tuple(question(f"at once {i}", [*ROOT[40:330], i, *ROOT[:i]], is_sampled=bool(i % 2)) for i in range(5))
QUESTIONS = (*(turn for turn, *_ in TURNS), *AT_ONCE)


async def ask(client: AsyncBatonClient, request: Request) -> Completion:
    return await client.complete(as_query(request), timeout_s=60)


ReusedTokens = Callable[[], Awaitable[float]]
"""Of the decode pool's counter: prompt tokens whose pages did not cross."""


def reused_tokens(metrics_port: int | None) -> ReusedTokens:
    assert metrics_port is not None

    async def look() -> float:
        return (await asyncio.to_thread(scrape, metrics_port))["baton_cache_reused_tokens"]

    return look


async def check(client: AsyncBatonClient, expected: dict[str, Shown], reused: ReusedTokens, *,
                has_states: bool = False) -> None:
    for turn, of_pages, of_states in TURNS:
        before = await reused()
        completion = await ask(client, turn)
        assert completion.finish.usage.cached_tokens == (of_states if has_states else of_pages), turn.request_id
        assert await reused() - before == of_pages, f"{turn.request_id}: states come with each prompt"
        assert shown(completion) == expected[turn.request_id], turn.request_id
    together = await asyncio.gather(*(ask(client, turn) for turn in AT_ONCE))
    if not has_states:
        assert sorted(completion.finish.usage.cached_tokens for completion in together) == [0, 288, 288, 288, 288]
    for completion, turn in zip(together, AT_ONCE, strict=True):
        assert shown(completion) == expected[turn.request_id], turn.request_id


def answers_of(checkpoint: Path, requests: Sequence[Request]) -> dict[str, Shown]:
    """By the ids of the requests."""
    return dict(zip([turn.request_id for turn in requests], on_the_wire(Reference(checkpoint).answers(list(requests))),
                    strict=True))


@pytest.mark.parametrize(("family", "dtype", "prefill_pp", "decode_pp"), [
    ("llama", torch.float32, 1, 1), ("llama", torch.bfloat16, 2, 1), ("qwen3_moe", torch.float32, 1, 2),
    ("deepseek_v3", torch.float32, 3, 1), ("glm_moe_dsa_pattern", torch.float32, 2, 2),
    ("glm_moe_dsa_pattern", torch.bfloat16, 1, 1), ("qwen3_5_text", torch.float32, 1, 1),
    ("qwen3_5_text", torch.bfloat16, 2, 3), ("qwen3_5_moe_text", torch.float32, 3, 1)])
async def test_warm_answers_are_cold_answers(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str,
                                             dtype: torch.dtype, prefill_pp: int, decode_pp: int) -> None:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), family, dtype=dtype)
    expected = answers_of(checkpoint, QUESTIONS)
    async with cluster_in_process(checkpoint, prefill_pp=prefill_pp, decode_pp=decode_pp, page_size=PAGE,
                                  chunk_tokens=CHUNK, num_pages=200, announced=tmp_path, decode_cache=True) as client:
        await check(client, expected, of_decode(tmp_path), has_states=family.startswith("qwen3_5"))


def of_decode(announced: Path) -> ReusedTokens:
    announcement = read_announcement(announced / "decode-0.json")
    assert announcement is not None
    return reused_tokens(announcement.metrics_port)


async def converse(client: AsyncBatonClient, reference: Reference, reused: ReusedTokens) -> list[float]:
    """Each turn goes on from the answer before it; returns what each found on the decode pool."""
    prompt, found = ROOT[:150], []
    for number in range(4):
        turn = replace(question(f"turn {number}", prompt, is_sampled=bool(number % 2)), max_tokens=41)
        (expected,) = on_the_wire(reference.answers([turn]))
        before = await reused()
        completion = await ask(client, turn)
        assert shown(completion) == expected, turn.request_id
        found.append(await reused() - before)
        prompt = [*prompt, *(token for token, _ in expected), *ROOT[10 * number:10 * number + 9]]
    return found


@pytest.mark.parametrize(("family", "decode_pp", "found"), [
    ("glm_moe_dsa_pattern", 2, [0, 176, 240, 288]), ("qwen3_5_text", 2, [0, 144, 192, 240])])
async def test_an_answer_is_there_when_the_next_turn_comes(
        tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str, decode_pp: int,
        found: list[int]) -> None:
    """Prompts of 150, 200, 250 and 300 tokens, of which 41 at a time are an answer whose last token was never computed.
    Recurrent layers draw with other bits than they read with: there only prompts are kept."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), family)
    async with cluster_in_process(checkpoint, decode_pp=decode_pp, page_size=PAGE, chunk_tokens=CHUNK, num_pages=200,
                                  announced=tmp_path, decode_cache=True) as client:
        assert await converse(client, Reference(checkpoint), of_decode(tmp_path)) == found


async def test_an_operator_empties_the_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """While a prompt that goes on from it is under way, too; what it leaves is there for the next one."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), "qwen3_5_text")
    turn = replace(TURNS[0][0], max_tokens=40)
    async with cluster_in_process(checkpoint, page_size=PAGE, chunk_tokens=CHUNK, num_pages=200,
                                  decode_cache=True) as client:
        cold = await ask(client, turn)
        again = asyncio.create_task(ask(client, turn))
        flushed = await client.flush_caches()
        assert sorted((each.role, each.error) for each in flushed) == [("decode", ""), ("prefill", "")]
        assert [each.pages for each in flushed] == [12, 12]
        assert shown(await again) == shown(cold)
        await client.flush_caches()
        for cached_tokens in (0, 192):
            after = await ask(client, turn)
            assert (after.finish.usage.cached_tokens, shown(after)) == (cached_tokens, shown(cold))


async def test_with_a_draft_that_reads_prompts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes of their own, drafts on both sides, layers that share their selected keys."""
    folder = tmp_path_factory.mktemp("warm")
    checkpoint = add_nextn(make_checkpoint(folder, "glm_moe_dsa_pattern"), folder / "model",
                           index_share_for_mtp_iteration=True)
    flags = ("--page-size", str(PAGE), "--chunk-tokens", str(CHUNK), "--draft", str(checkpoint), "--spec-steps", "3",
             "--spec-draft-tokens", "3", "--no-spec-adaptive", "--decode-cache")
    expected = answers_of(checkpoint, QUESTIONS)
    async with running_cluster(checkpoint, prefill_pp=2, decode_pp=2, worker_flags=flags) as running:
        reused = reused_tokens(await running.metrics_port("decode-0.0"))
        await check(running.client, expected, reused)
        found = await converse(running.client, Reference(checkpoint), reused)
        assert all(held >= least for held, least in zip(found[1:], [176, 224, 272], strict=True)), found
        await running.until_clean()


@pytest.mark.parametrize(("prefill", "decode", "max_tokens"), [
    ({"num_pages": 40, "max_running": 3}, {"num_pages": 200}, 8), ({"num_pages": 200}, {"num_pages": 30}, 40)])
async def test_a_pool_short_of_pages_gives_up_what_nobody_uses(
        tmp_path_factory: pytest.TempPathFactory, prefill: dict[str, int], decode: dict[str, int],
        max_tokens: int) -> None:
    """Requests that are dropped in mid-stream included; a decode pool sets others back and reads them again."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("warm"), "llama")
    prompts = [replace(question(f"q{i}", [*ROOT[:40 * (i % 3)], *ROOT[i:i + 150]]), max_tokens=max_tokens)
               for i in range(6)]
    expected = on_the_wire(Reference(checkpoint).answers(prompts))
    async with cluster_in_process(checkpoint, page_size=PAGE, chunk_tokens=CHUNK, max_context=300, decode_cache=True,
                                  prefill=prefill, decode=decode) as client:

        async def drop(request: Request) -> None:
            async with asyncio.timeout(0.02 * len(request.request_id)):
                await ask(client, replace(request, request_id=f"{request.request_id}, dropped"))

        for _ in range(2):
            dropped = [asyncio.create_task(drop(request)) for request in prompts[::3]]
            answers = await asyncio.gather(*(ask(client, request) for request in prompts))
            await asyncio.gather(*dropped, return_exceptions=True)
            assert [shown(answer) for answer in answers] == expected
