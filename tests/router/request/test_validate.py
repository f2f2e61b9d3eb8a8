"""Bad requests: each is refused with the path of the field and the limit, all violations at once,
before any work."""

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from baton.wire import model_info_of
from pool.request.conversion import request_from_proto
from protos import generation_pb2, types_pb2
from router.request.validate import AdmissibleRequest, admissible
from router.text.chat_template import ChatTemplate
from router.text.model_facts import ServedAdapters, ServedModel
from router.text.tokenizer import TextTokenizer
from runtime.errors import InvalidRequestError, UnknownModelError
from runtime.grammar import Grammar, Grammars
from runtime.version import VERSION
from tests.router.harness import (
    EOS,
    FACTS,
    byte_level_tokenizer,
    running_router,
    served_model,
    without_tokenizer,
)
from tests.support.router.fake_workers import VOCAB_SIZE, Fabric, FakeDecode, FakePrefill, Journal

Change = Callable[[generation_pb2.GenerateRequest], Any]


async def check(
    request: generation_pb2.GenerateRequest, model: ServedModel | None = None
) -> AdmissibleRequest:
    model = model or served_model()
    return await admissible(request, model.facts, model.text_tokenizer, new_seed=lambda: 42)


def good() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1, 2, 3]))


def with_sampling(**fields: float) -> Change:
    return lambda request: request.sampling.MergeFrom(types_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def with_bias(entries: dict[int, float]) -> Change:
    return lambda request: request.sampling.logit_bias.update(entries)


def with_stop(**fields: Any) -> Change:  # noqa: ANN401
    return lambda request: request.stop.MergeFrom(types_pb2.StopConditions(**fields))


def with_fields(**fields: Any) -> Change:  # noqa: ANN401
    return lambda request: request.MergeFrom(generation_pb2.GenerateRequest(**fields))


def with_ids(ids: list[int]) -> Change:
    return lambda request: request.token_ids.CopyFrom(types_pb2.TokenIds(ids=ids))


def with_chat(*turns: tuple[str, str]) -> Change:
    messages = [generation_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return lambda request: request.chat.CopyFrom(generation_pb2.ChatMessages(messages=messages))


def without_prompt(request: generation_pb2.GenerateRequest) -> None:
    request.ClearField("token_ids")


def both(*changes: Change) -> Change:
    return lambda request: [change(request) for change in changes]


BAD: dict[str, tuple[Change, str, str]] = {
    "a newer version's field": (
        lambda request: request.sampling.MergeFromString(b"\x98\x3e\x01"),
        "sampling.field 995",
        f"is unknown to this version ({VERSION})",
    ),
    "no prompt": (without_prompt, "prompt", "must be given"),
    "empty text": (with_fields(text=""), "text", "not be empty"),
    "no ids": (with_ids([]), "token_ids.ids", "not be empty"),
    "id beyond the vocabulary": (
        with_ids([1, VOCAB_SIZE, 2]),
        "token_ids.ids[1]",
        "512 is not in the vocabulary",
    ),
    "too many ids": (
        with_ids([1] * 256),
        "token_ids",
        "256 tokens; the maximum context length of 256",
    ),
    "too long a text": (with_fields(text="x y" * 256), "text", "maximum context length of 256"),
    "far too many ids": (
        with_ids([VOCAB_SIZE] * 100_000),
        "token_ids",
        "100000 tokens; the maximum context length",
    ),
    "far too long a text": (with_fields(text="x" * 100_000), "text", "100000 characters"),
    "no messages": (with_chat(), "chat.messages", "not be empty"),
    "no role": (with_chat(("user", "a"), ("", "b")), "chat.messages[1].role", "not be empty"),
    "many messages": (
        with_chat(*[("", "")] * 4097),
        "chat.messages",
        "4097 entries, the limit is 4096",
    ),
    "far too long a message": (
        with_chat(("user", "x" * 100_000)),
        "chat.messages",
        "100004 characters",
    ),
    "far too long a role": (with_chat(("x" * 100_000, "hi")), "chat.messages", "100002 characters"),
    "long request id": (
        with_fields(request_id="ü" * 65),
        "request_id",
        "130 bytes, the limit is 128",
    ),
    "request id of several lines": (with_fields(request_id="a\nb"), "request_id", "printable"),
    "session of several lines": (with_fields(session_id="a\nb"), "session_id", "printable"),
    "long session": (with_fields(session_id="ü" * 65), "session_id", "130 bytes, the limit is 128"),
    "long hint": (
        with_fields(kv_hints=generation_pb2.KvHints(message_id="m" * 129)),
        "kv_hints.message_id",
        "129 bytes, the limit is 128",
    ),
    "priority": (
        with_fields(priority=101),
        "priority",
        "between -100 and 100 for this client, got 101",
    ),
    "low priority": (with_fields(priority=-101), "priority", "got -101"),
    "top logprobs": (with_fields(num_top_logprobs=21), "num_top_logprobs", "at most 20, got 21"),
    "negative temperature": (
        with_sampling(temperature=-0.5),
        "sampling.temperature",
        "between 0 and 100, got -0.5",
    ),
    "NaN temperature": (with_sampling(temperature=math.nan), "sampling.temperature", "got nan"),
    "infinite temperature": (
        with_sampling(temperature=math.inf),
        "sampling.temperature",
        "got inf",
    ),
    "zero top_p": (with_sampling(top_p=0.0), "sampling.top_p", "above 0 and at most 1, got 0"),
    "large top_p": (with_sampling(top_p=1.5), "sampling.top_p", "got 1.5"),
    "NaN top_p": (with_sampling(top_p=math.nan), "sampling.top_p", "got nan"),
    "min_p": (with_sampling(min_p=-0.5), "sampling.min_p", "between 0 and 1"),
    "frequency": (
        with_sampling(frequency_penalty=2.5),
        "sampling.frequency_penalty",
        "between -2 and 2, got 2.5",
    ),
    "presence": (
        with_sampling(presence_penalty=-math.inf),
        "sampling.presence_penalty",
        "got -inf",
    ),
    "repetition": (
        with_sampling(repetition_penalty=0.0),
        "sampling.repetition_penalty",
        "above 0 and at most 10",
    ),
    "bias": (with_bias({3: 101.0}), "sampling.logit_bias[3]", "between -100 and 100, got 101"),
    "NaN bias": (with_bias({3: math.nan}), "sampling.logit_bias[3]", "got nan"),
    "bias of no token": (
        with_bias({VOCAB_SIZE: 1.0}),
        "sampling.logit_bias[512]",
        "not in the vocabulary",
    ),
    "many biases": (
        with_bias(dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias",
        "1025 entries",
    ),
    "no max_tokens": (with_stop(max_tokens=0), "stop.max_tokens", "at least 1"),
    "min above max": (
        with_stop(min_tokens=5, max_tokens=4),
        "stop.min_tokens",
        "at most max_tokens (4), got 5",
    ),
    "min above context": (with_stop(min_tokens=254), "stop.min_tokens", "at most 253"),
    "empty stop string": (
        with_stop(stop_strings=["a", ""]),
        "stop.stop_strings[1]",
        "not be empty",
    ),
    "many stop strings": (
        with_stop(stop_strings=["a"] * 17),
        "stop.stop_strings",
        "17 entries, the limit is 16",
    ),
    "long stop string": (
        with_stop(stop_strings=["a", "ü" * 513]),
        "stop.stop_strings[1]",
        "1026 bytes, the limit is 1024",
    ),
    "stop strings without text": (
        both(with_stop(stop_strings=["a"]), with_fields(skip_text=True)),
        "stop.stop_strings",
        "skip_text",
    ),
    "stop token": (
        with_stop(stop_token_ids=[1, VOCAB_SIZE]),
        "stop.stop_token_ids[1]",
        "not in the vocabulary",
    ),
    "no choices": (with_fields(n=0), "n", "between 1 and 16, got 0"),
    "many choices": (with_fields(n=17), "n", "between 1 and 16, got 17"),
    "many prompt logprobs": (
        with_fields(num_prompt_logprobs=21),
        "num_prompt_logprobs",
        "at most 20, got 21",
    ),
    "far too many resumed": (
        with_fields(resumed=[types_pb2.TokenIds(ids=[VOCAB_SIZE] * 100_000)]),
        "resumed[0].ids",
        "100000 tokens, the maximum context length is 256",
    ),
    "many stop tokens": (
        with_stop(stop_token_ids=[1] * 65),
        "stop.stop_token_ids",
        "65 entries, the limit is 64",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_names_the_field_and_the_limit(name: str) -> None:
    change, field, text = BAD[name]
    request = good()
    change(request)
    with pytest.raises(InvalidRequestError) as caught:
        await check(request)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert text in caught.value.violations[0].description


async def test_all_violations_come_at_once() -> None:
    request = generation_pb2.GenerateRequest(
        priority=500,
        sampling=types_pb2.SamplingParams(top_p=2, min_p=2),
        stop=types_pb2.StopConditions(stop_strings=[""]),
    )
    with pytest.raises(InvalidRequestError) as caught:
        await check(request)
    assert {violation.field for violation in caught.value.violations} == {
        "prompt",
        "priority",
        "sampling.top_p",
        "sampling.min_p",
        "stop.stop_strings[0]",
    }


async def test_another_model_is_not_found() -> None:
    request = good()
    request.model = "other"
    with pytest.raises(UnknownModelError, match="'other' is not served, 'tiny' is"):
        await check(request)
    request.model = "tiny"
    await check(request)
    request.model = "alias"
    await check(request, replace(served_model(), facts=replace(FACTS, aliases=("alias",))))
    request.model = "x" * 100_000
    with pytest.raises(UnknownModelError) as caught:
        await check(request)
    assert len(str(caught.value)) < 200


async def test_the_largest_chat_passes() -> None:
    request = good()
    with_chat(*[("a", "")] * 4096)(request)
    counting = TextTokenizer(byte_level_tokenizer(), ChatTemplate("{{ messages | length }}", {}))
    checked = await check(request, ServedModel(replace(FACTS, max_context_tokens=8192), counting))
    assert list(checked.engine.prompt_token_ids) == byte_level_tokenizer().encode("4096").ids


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (with_fields(text="hi"), "text"),
        (with_chat(("user", "hi")), "chat"),
        (with_stop(stop_strings=["a"]), "stop.stop_strings"),
    ],
)
async def test_without_tokenizer_only_ids_are_served(change: Change, field: str) -> None:
    request = good()
    change(request)
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        await check(request, without_tokenizer())
    assert [violation.field for violation in caught.value.violations] == [field]
    assert list((await check(good(), without_tokenizer())).engine.prompt_token_ids) == [1, 2, 3]


async def test_chat_without_template_is_refused() -> None:
    request = good()
    with_chat(("user", "hi"))(request)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await check(request, ServedModel(FACTS, TextTokenizer(byte_level_tokenizer(), None)))


async def test_a_chat_that_renders_to_nothing_is_empty() -> None:
    request = good()
    with_chat(("user", "hi"))(request)
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await check(
            request, ServedModel(FACTS, TextTokenizer(byte_level_tokenizer(), ChatTemplate("", {})))
        )


async def test_absent_fields_become_defaults_and_zero_stays_zero() -> None:
    engine = (await check(good())).engine
    expected = types_pb2.SamplingParams(
        temperature=1,
        top_k=0,
        top_p=1,
        min_p=0,
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        seed=42,
    )
    assert engine.sampling == expected
    assert (engine.max_tokens, engine.min_tokens, list(engine.stop_token_ids)) == (253, 0, [EOS])
    assert not engine.HasField("num_top_logprobs")
    request = good()
    with_sampling(temperature=0.0, seed=0)(request)
    request.num_top_logprobs = 0
    engine = (await check(request)).engine
    assert (engine.sampling.temperature, engine.sampling.seed) == (0, 0)
    assert engine.HasField("num_top_logprobs")


OF_THE_MODEL = replace(
    FACTS,
    sampling={
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    },
)


async def test_sampling_that_a_request_leaves_open_is_the_models() -> None:
    model = replace(served_model(), facts=OF_THE_MODEL)
    engine = (await check(good(), model)).engine
    assert engine.sampling == types_pb2.SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.05,
        frequency_penalty=0,
        presence_penalty=0,
        seed=42,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1.0),
        ("top_k", 0),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
    ],
)
async def test_client_parameters_win_over_the_models_even_if_zero(name: str, value: float) -> None:
    request = good()
    with_sampling(**{name: value})(request)
    sampling = (await check(request, replace(served_model(), facts=OF_THE_MODEL))).engine.sampling
    expected = {**OF_THE_MODEL.sampling, name: value}
    assert {field: getattr(sampling, field) for field in expected} == pytest.approx(expected)


async def test_clients_see_the_sampling_defaults() -> None:
    async with running_router(model=replace(served_model(), facts=OF_THE_MODEL)) as router:
        told = await router.stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10)
    sampling = model_info_of(told).default_sampling
    assert (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
    ) == pytest.approx((0.6, 0.95, 0.1, 1.05))
    assert (sampling.top_k, sampling.frequency_penalty, sampling.presence_penalty) == (20, 0, 0)
    assert sampling.seed is None


@pytest.mark.parametrize(
    ("change", "field"),
    [(with_fields(text="red <image> mill"), "text"), (with_chat(("user", "red")), "chat.messages")],
)
async def test_a_token_beyond_the_vocabulary_is_refused_in_the_clients_terms(
    change: Change, field: str
) -> None:
    """An example is the image token of a text-only model whose tokenizer has it."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<image>")])
    beyond = tokenizer.token_to_id("<image>")
    assert beyond is not None
    few = replace(FACTS, vocab_size=beyond)
    template = ChatTemplate("<image>{{ messages[0]['content'] }}", {})
    request = good()
    change(request)
    with pytest.raises(InvalidRequestError) as caught:
        await check(request, ServedModel(few, TextTokenizer(tokenizer, template)))
    (violation,) = caught.value.violations
    assert (violation.field, violation.description) == (
        field,
        f"contains '<image>', a token of the tokenizer that the model does not have: {beyond} is not in the "
        f"vocabulary of {beyond} tokens",
    )


@pytest.mark.parametrize(
    ("given", "speculates"),
    [({}, True), ({"speculate": True}, True), ({"speculate": False}, False)],
)
async def test_declined_drafts_are_declined_on_the_worker(
    given: dict[str, bool],
    speculates: bool,  # noqa: FBT001
) -> None:
    request = good()
    with_fields(**given)(request)
    heard = request_from_proto(
        (await check(request)).engine, vocab_size=VOCAB_SIZE, max_context_tokens=256
    )
    assert heard.speculates is speculates


async def test_a_prompt_is_not_read_back_from_its_message() -> None:
    """That takes longer than to name all of its blocks."""
    request = await check(good())
    assert request.prompt.token_ids == array("I", request.engine.prompt_token_ids)


async def test_the_largest_allowed_values_pass() -> None:
    request = good()
    both(
        with_sampling(
            temperature=100,
            top_p=1,
            min_p=1,
            frequency_penalty=2,
            presence_penalty=-2,
            repetition_penalty=10,
            top_k=2**32 - 1,
            seed=2**64 - 1,
        ),
        with_bias(dict.fromkeys(range(VOCAB_SIZE), -100.0)),
        with_stop(
            max_tokens=4,
            min_tokens=4,
            stop_strings=["a" * 1024] * 16,
            stop_token_ids=[1] * 64,
            ignore_eos=True,
        ),
        with_fields(request_id="x" * 128, priority=-100, num_top_logprobs=20),
    )(request)
    checked = await check(request)
    assert checked.engine.max_tokens == checked.engine.min_tokens == 4
    assert list(checked.engine.stop_token_ids) == [1]
    assert checked.engine.sampling.top_k == 2**32 - 1


async def test_max_tokens_is_cut_to_the_context() -> None:
    request = good()
    with_stop(max_tokens=10_000)(request)
    assert (await check(request)).engine.max_tokens == 253
    with_ids([1] * 255)(request)
    assert (await check(request)).engine.max_tokens == 1


@pytest.mark.parametrize(
    ("change", "kind", "field", "num_violations"),
    [
        (
            with_bias(dict.fromkeys(range(VOCAB_SIZE, VOCAB_SIZE + 1024), 1.0)),
            InvalidRequestError,
            "sampling.logit_bias[512]",
            17,
        ),
        (with_chat(*[("", "")] * 4096), InvalidRequestError, "chat.messages[0].role", 17),
        (with_fields(model="x" * 20_000), UnknownModelError, "model", 1),
    ],
)
async def test_many_or_long_mistakes_reach_the_client_with_their_fields(
    change: Change, kind: type[InvalidRequestError], field: str, num_violations: int
) -> None:
    request = good()
    change(request)
    async with running_router() as router:
        error = await router.failure(request)
    assert isinstance(error, kind)
    assert error.violations[0].field == field
    assert len(error.violations) == num_violations


async def test_a_grammar_counts_for_the_client_of_its_request() -> None:
    brought: list[tuple[str, str]] = []

    class Noting:
        async def check(self, grammar: Grammar, client: str = "") -> None:
            brought.append((grammar.text, client))

    request, model = good(), served_model()
    request.structured_output.regex = "a"
    await admissible(
        request,
        model.facts,
        model.text_tokenizer,
        lambda: 42,
        cast("Grammars", Noting()),
        client="alice",
    )
    assert brought == [("a", "alice")]


async def test_bad_input_reaches_no_worker_and_leaves_nothing() -> None:
    journal = Journal()
    fabric = Fabric()
    async with running_router(
        FakePrefill("p", fabric, journal), FakeDecode("d", fabric, journal)
    ) as router:
        for change, field, _ in BAD.values():
            request = good()
            change(request)
            error = await router.failure(request)
            assert isinstance(error, InvalidRequestError)
            assert error.violations[0].field == field
        assert journal.entries == []
        await router.assert_nothing_left()


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("", ""),
        ("tiny", ""),
        ("little", ""),
        ("tiny:a", "a"),
        ("little:b.1", "b.1"),
        (":a", "a"),
        ("a", "a"),
        ("with:colon", ""),
        ("with:colon:a", "a"),
        ("tiny:", None),
        ("tiny:c", None),
        ("a:a", None),
        ("tiny:a:a", None),
        ("colon", None),
    ],
)
async def test_a_model_name_may_name_an_adapter(name: str, adapter: str | None) -> None:
    model = served_model()
    facts = replace(
        model.facts,
        aliases=("little", "with:colon"),
        adapters=ServedAdapters({"a": "a@1", "b.1": "b.1@2"}, former={"c": ("c@3",)}),
    )
    request = good()
    plain = await check(request, replace(model, facts=facts))
    request.model = name
    if adapter is None:
        with pytest.raises(UnknownModelError, match="also with the adapters a, b"):
            await check(request, replace(model, facts=facts))
        return
    found = await check(request, replace(model, facts=facts))
    key = facts.adapters.offered[adapter] if adapter else ""
    assert found.engine.adapter == found.prompt.adapter == key
    assert (found.prompt.digest == plain.prompt.digest) is (adapter == "")
