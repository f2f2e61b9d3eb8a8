"""A response that another router began resumes here at any position, as if uninterrupted."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from protos import generation_pb2, types_pb2
from router.request.answer import Output
from router.text.tokenizer import TextTokenizer
from runtime.errors import InvalidRequestError, UnavailableError
from tests.router.harness import FACTS, RouterHarness, running_router, served_model, token_request
from tests.router.text.test_detokenizer import LLAMA_2, sentencepiece_like
from tests.support.router.fake_workers import (
    Fabric,
    FakeDecode,
    FakePrefill,
    Journal,
    Point,
    expected_tokens,
)

PROMPT = [1, 2, 3]
NUM_TOKENS = 9


def pair() -> tuple[FakePrefill, FakeDecode]:
    fabric, journal = Fabric(), Journal()
    return FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)


def a_question(*resumed: list[int], **fields: object) -> generation_pb2.GenerateRequest:
    return token_request(
        PROMPT,
        max_tokens=NUM_TOKENS,
        num_top_logprobs=0,
        resumed=[types_pb2.TokenIds(ids=ids) for ids in resumed],
        **fields,
    )


@dataclass(frozen=True)
class Said:
    """The output of one choice, from the `first` remaining token on."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    end: tuple[str, object, int, int]


async def said(router: RouterHarness, request: generation_pb2.GenerateRequest) -> dict[int, Said]:
    """Return the output by choice; usage includes earlier tokens."""
    told: dict[int, Said] = {}
    async for response in router.stub.Generate(request, timeout=60):
        so_far = told.get(response.index, Said([], [], "", ("", None, 0, 0)))
        finish, chunk = response.finish, response.chunk
        assert not so_far.end[0], "something came after the finish"
        end = so_far.end
        if response.HasField("finish"):
            matched = finish.WhichOneof("matched")
            end = (
                types_pb2.FinishReason.Name(finish.reason),
                matched and getattr(finish, matched),
                finish.usage.prompt_tokens,
                finish.usage.completion_tokens,
            )
        told[response.index] = Said(
            so_far.token_ids + list(chunk.token_ids),
            so_far.logprobs + [item.logprob for item in chunk.logprobs],
            so_far.text + chunk.text,
            end,
        )
    return told


def texts_of(token_ids: list[int], stop_strings: Sequence[str]) -> list[str]:
    """Return the text that comes with the first token, with the second, and so on."""
    text_tokenizer = served_model().text_tokenizer
    assert text_tokenizer is not None
    output = Output(types_pb2.EngineRequest(), stop_strings, text_tokenizer.detokenizers.new(()))
    return [
        output.add(types_pb2.TokenChunk(token_ids=[token_id])).chunk.text for token_id in token_ids
    ]


@pytest.mark.parametrize("stops", ["", "in the middle", "at the end", "never"])
async def test_a_resumed_output_equals_the_uninterrupted_one(stops: str) -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        request = a_question()
        text = (await said(router, request))[0].text
        assert len(text) >= NUM_TOKENS
        # The last token of the string ends it; that it might still come is why text is held back
        # before.
        string = {
            "": "",
            "in the middle": text[3:6],
            "at the end": text[-3:],
            "never": text[-2:] + "never",
        }[stops]
        request.stop.stop_strings.extend(filter(None, [string]))
        whole = (await said(router, request))[0]
        texts = texts_of(whole.token_ids, request.stop.stop_strings)
        assert whole.end[0] == ("FINISH_REASON_STOP" if "the" in stops else "FINISH_REASON_LENGTH")
        for count in range(len(whole.token_ids) + 1):
            request.ClearField("resumed")
            request.resumed.append(types_pb2.TokenIds(ids=whole.token_ids[:count]))
            rest = (await said(router, request))[0]
            assert rest.token_ids == whole.token_ids[count:]
            assert rest.logprobs == [
                -float(token_id) for token_id in whole.token_ids[max(count, 1) :]
            ]
            assert "".join(texts[:count]) + rest.text == whole.text
            assert rest.end == whole.end
        await router.assert_nothing_left()


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([2, 510], [" the", " red", " mill"]), ([300, 300, 424], ["the", " red", " mill"])],
)
async def test_the_first_space_is_dropped_only_after_a_prompt_without_text(
    prompt: list[int], texts: list[str]
) -> None:
    """Earlier output makes no difference, and stop strings see the space. The fakes return 0, 1, 2;
    ids above 265 are not in the tokenizer."""
    model = replace(served_model(), text_tokenizer=TextTokenizer(sentencepiece_like(LLAMA_2), None))
    async with running_router(*pair(), model=model) as router:
        request = token_request(prompt, max_tokens=3)
        for count in range(3):
            request.ClearField("resumed")
            request.resumed.append(types_pb2.TokenIds(ids=[0, 1, 2][:count]))
            assert (await said(router, request))[0].text == "".join(texts[count:])
        request = token_request(prompt, max_tokens=3)
        request.stop.stop_strings.append(" the")
        finish = (await router.ask(request)).finish
        assert finish is not None
        assert finish.stop_string == (" the" if texts[0] == " the" else "")
        await router.assert_nothing_left()


async def test_a_stop_token_ends_it_at_any_cut() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        request = a_question()
        request.stop.stop_token_ids.append(expected_tokens(PROMPT, 6)[-1])
        whole = (await said(router, request))[0]
        assert whole.end == ("FINISH_REASON_STOP", whole.token_ids[-1], len(PROMPT), 6)
        for count in (5, 6):
            request.ClearField("resumed")
            request.resumed.append(types_pb2.TokenIds(ids=whole.token_ids[:count]))
            assert (await said(router, request))[0].end == whole.end
        assert router.metric("baton_router_retries_total", role="prefill", reason="PEER_LOST") == 0
        await router.assert_nothing_left()


async def test_a_finished_response_needs_no_workers() -> None:
    """The finish was lost, and with it every pool."""
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        whole = await router.ask(a_question())
        journal = len(prefill.journal.entries)
        await prefill.die()
        rest = await router.ask(a_question(list(whole.token_ids)))
        assert rest.finish is not None
        assert whole.finish is not None
        assert (rest.chunks, rest.finish.usage, rest.finish.reason) == (
            [],
            whole.finish.usage,
            whole.finish.reason,
        )
        assert len(prefill.journal.entries) == journal
        await router.assert_nothing_left()


async def test_each_choice_resumes_from_its_own_position() -> None:
    prefill, decode = pair()
    tokens = expected_tokens(PROMPT, NUM_TOKENS)
    async with running_router(prefill, decode) as router:
        rest = await said(router, a_question(tokens[:4], tokens, [], n=4))
        assert {index: choice.token_ids for index, choice in rest.items()} == {
            0: tokens[4:],
            1: [],
            2: tokens,
            3: tokens,
        }
        assert {choice.end for choice in rest.values()} == {
            ("FINISH_REASON_LENGTH", None, len(PROMPT), NUM_TOKENS)
        }
        assert router.metric("baton_resumptions_total") == 2
        await router.assert_nothing_left()


@pytest.mark.parametrize(("resumed", "scores"), [([], [1, 2]), ([6], [])])
async def test_prompt_logprobs_come_until_the_first_token_has(
    resumed: list[int], scores: list[int]
) -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        answer = await router.ask(a_question(resumed, num_prompt_logprobs=0))
        assert [
            chunk.prompt_logprobs.first_position + place
            for chunk in answer.chunks
            for place in range(len(chunk.prompt_logprobs.token_ids))
        ] == scores


async def test_a_resumed_response_survives_the_loss_of_its_pool() -> None:
    fabric, journal = Fabric(), Journal()
    prefill, pools = (
        FakePrefill("p", fabric, journal),
        [FakeDecode(f"d{i}", fabric, journal) for i in range(2)],
    )
    tokens = expected_tokens(PROMPT, NUM_TOKENS)
    async with running_router(prefill, *pools) as router:
        seen = 0

        async def once(_: object) -> None:
            nonlocal seen
            seen += 1
            if seen == 2:
                await asyncio.gather(*(pool.die() for pool in pools if pool.open_requests))

        for pool in pools:
            pool.at(Point.TOKEN, once)
        assert (await router.ask(a_question(tokens[:4]))).token_ids == tokens[4:]
        assert router.metric("baton_migrations_total", type="lost", outcome="resumed") == 1
        await router.assert_nothing_left()


async def test_a_response_resumes_on_the_same_weights_only() -> None:
    """In the middle of an upgrade there are pools of old and new weights; then the old ones are
    gone."""
    fabric, journal = Fabric(), Journal()
    old, new = (
        (
            FakePrefill(f"p-{name}", fabric, journal, compatibility=name),
            FakeDecode(f"d-{name}", fabric, journal, compatibility=name),
        )
        for name in ("old", "new")
    )
    tokens = expected_tokens(PROMPT, NUM_TOKENS)
    async with running_router(*old, *new) as router:
        for name in ("old", "new", "old", "new"):
            answer = await router.ask(a_question(tokens[:4], resumed_from=[name]))
            assert answer.token_ids == tokens[4:]
            workers, *others = [chunk.compatibility.partition("@")[0] for chunk in answer.chunks]
            assert (workers, set(others)) == (name, {""})
        both = await said(
            router, a_question(tokens[:4], tokens[:2], n=2, resumed_from=["old", "new"])
        )
        assert {index: choice.token_ids for index, choice in both.items()} == {
            0: tokens[4:],
            1: tokens[2:],
        }
        for worker in old:
            await worker.die()
        with pytest.raises(
            UnavailableError, match="no available worker matches the weights and numerics"
        ):
            await router.ask(a_question(tokens[:4], resumed_from=["old"]))
        assert (await router.ask(a_question(tokens[:4], resumed_from=["new"]))).token_ids == tokens[
            4:
        ]
        await router.assert_nothing_left()


async def test_a_response_resumes_for_the_same_prompt_only() -> None:
    """A client sends its chat again to a router with another template: the tokens that it has would
    follow another prompt, and the first of them may well be the same."""
    fabric, journal = Fabric(), Journal()
    tokens = expected_tokens(PROMPT, NUM_TOKENS)
    async with running_router(
        FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    ) as router:
        sampled_by = (await router.ask(a_question([]))).chunks[0].compatibility
        assert (
            await router.ask(a_question(tokens[:4], resumed_from=[sampled_by]))
        ).token_ids == tokens[4:]
        other = a_question(tokens[:4], resumed_from=[sampled_by])
        other.token_ids.ids.append(1)
        with pytest.raises(
            UnavailableError,
            match=r"resumed_from\[0\]: the response began for a prompt with the digest",
        ):
            await router.ask(other)
        await router.assert_nothing_left()


TOKENS = expected_tokens(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (a_question([], []), "resumed", "has 2 entries, the limit is one per choice: 1"),
        (
            a_question([6], resumed_from=["", ""]),
            "resumed_from",
            "has 2 entries, the limit is one per entry of resumed: 1",
        ),
        (
            a_question([6], resumed_from=["x" * 257]),
            "resumed_from[0]",
            "has 257 characters, the limit is 256",
        ),
        (
            a_question([6, FACTS.vocab_size]),
            "resumed[0].ids[1]",
            "512 is not in the vocabulary of 512 tokens",
        ),
        (
            a_question([], [*TOKENS, 0], n=2),
            "resumed[1].ids",
            "has 10 tokens, more than the 9 that the response may have",
        ),
        (
            a_question([6, FACTS.eos_token_ids[0], 7]),
            "resumed[0].ids[2]",
            "follows the end of the response",
        ),
        (a_question([7]), "resumed", r"begins with \[7\], the response to this request with \[6\]"),
    ],
)
async def test_tokens_that_cannot_be_are_refused_by_name(
    request_: generation_pb2.GenerateRequest, field: str, says: str
) -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        with pytest.raises(InvalidRequestError, match=says) as refused:
            await router.ask(request_)
        assert refused.value.violations[0].field == field
        await router.assert_nothing_left()


async def test_resuming_after_a_stop_string_is_refused() -> None:
    prefill, decode = pair()
    async with running_router(prefill, decode) as router:
        text = (await router.ask(a_question())).text
        request = a_question(TOKENS)
        request.stop.stop_strings.append(text[:3])
        with pytest.raises(InvalidRequestError, match="follows the end of the response") as refused:
            await router.ask(request)
        assert refused.value.violations[0].field.startswith("resumed[0].ids[")


async def test_an_aborted_response_has_the_text_of_its_tokens() -> None:
    """All of it was held back, as a stop string might still come."""
    prefill, decode = pair()
    counted = itertools.count(1)
    held = asyncio.Event()

    async def hold(_: types_pb2.EngineRequest) -> None:
        if next(counted) > 4:
            held.set()
            await asyncio.sleep(30)

    async with running_router(prefill, decode) as router:
        request = a_question()
        text = (await router.ask(request)).text
        request.request_id = "r"
        request.stop.stop_strings.append(text + "never")
        decode.at(Point.TOKEN, hold)
        answer = asyncio.create_task(said(router, request))
        await held.wait()
        await router.stub.Abort(generation_pb2.AbortRequest(request_ids=["r"]))
        told = (await answer)[0]
        assert told.end[0] == "FINISH_REASON_ABORTED"
        assert told.text
        assert told.text == "".join(texts_of(told.token_ids, []))[: len(told.text)]


async def test_tokens_that_the_client_has_are_charged_once() -> None:
    """To the router that generated them, not to the one that resumes the response."""
    async with running_router(*pair()) as router:
        whole = await router.ask(a_question())
        charged = router.metric("baton_client_tokens_total", client="other", kind="generated")
        assert charged == len(whole.token_ids)
        rest = await router.ask(a_question(whole.token_ids[:4]))
        charged += len(rest.token_ids)
        assert rest.token_ids == whole.token_ids[4:]
        value = router.metric("baton_client_tokens_total", client="other", kind="generated")
        assert value == charged
