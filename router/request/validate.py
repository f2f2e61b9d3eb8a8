"""Validation of a request against the limits of the protos and of the model, before any work.

All violations are reported at once, each with the path of its field and the limit. A valid request
becomes an `AdmissibleRequest`: tokenized, every default resolved, ready for the workers.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from protos import generation_pb2, types_pb2
from router.request.cache_hints import MAX_SESSION_ID_BYTES, hint_violations
from router.request.chats import MAX_CHAT_MESSAGES, chat_of, chat_violations, num_characters
from router.request.priorities import MAX_PRIORITY
from router.request.resumption import (
    OF_PROMPT,
    began_with,
    resumed_violations,
    too_many_resumed,
    workers_of,
)
from router.text.model_facts import ModelLimits
from router.text.tokenizer import TextTokenizer
from router.workers.placement_request import PlacementRequest
from router.workers.prefix_index import RoutedPrompt, prompt_of
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, Grammars
from runtime.rpc.unknown_fields import unknown_fields
from runtime.sampling_limits import LOGIT_BIAS_INTERVAL, SAMPLING_DEFAULTS, SAMPLING_INTERVALS

MAX_REQUEST_ID_BYTES = 128
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16
MAX_CACHE_SALT_BYTES = 128
MAX_SHOWN_CHARACTERS = 128  # of a text quoted in an error
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True)
class AdmissibleRequest:
    """A valid request.

    `engine` is its first choice; its `request_id` is empty if the client chose none. `resumed`
    holds, for each choice in turn, the tokens that its client already has. `resumed_from` holds,
    for each choice, the compatibility of the workers that sampled them, "" if any workers may
    continue. `routed` has the prompt tokens of `engine` as machine integers, because reading them
    from a message takes ten times as long; None if they are not at hand. `client` is the key of the
    client's share of the pools, and `weight` its size relative to others.
    """

    engine: types_pb2.EngineRequest
    stop_strings: tuple[str, ...]
    wants_text: bool
    num_choices: int = 1
    resumed: tuple[tuple[int, ...], ...] = ()
    resumed_from: tuple[str, ...] = ()
    routed: RoutedPrompt | None = None
    client: str = ""
    weight: float = 1.0

    @cached_property
    def prompt(self) -> RoutedPrompt:
        """Return the prompt in the form used to choose workers."""
        return self.routed or prompt_of(self.engine)

    def resumed_of(self, index: int) -> tuple[int, ...]:
        """Return the resumed tokens of choice `index`."""
        return self.resumed[index] if index < len(self.resumed) else ()

    @property
    def compatibility(self) -> str:
        """Return the compatibility that the first choice's workers must fit; empty if any do."""
        return self.resumed_from[0] if self.resumed_from else ""

    def sampled_by(self, compatibility: str) -> str:
        """Return the `resumed_from` value for tokens sampled by workers of this compatibility."""
        return f"{compatibility}{OF_PROMPT}{self.prompt.digest}"

    @cached_property
    def placement(self) -> PlacementRequest:
        """Return what the request needs of its workers."""
        context_tokens = len(self.engine.prompt_token_ids) + self.engine.max_tokens
        return PlacementRequest(self.prompt, context_tokens, self.compatibility)


async def admissible(
    request: generation_pb2.GenerateRequest,
    facts: ModelLimits,
    text_tokenizer: TextTokenizer | None,
    new_seed: Callable[[], int],
    grammars: Grammars | None = None,
    *,
    most_urgent: int = -MAX_PRIORITY,
    client: str = "",
) -> AdmissibleRequest:
    """Validate a request of `client` and return it in the workers' terms.

    `new_seed` returns the seed of a request that has none. Without `grammars` structured output is
    not available. `most_urgent` is the smallest priority that the client may use. It is also the
    priority of a request without one, if 0 would be too urgent.

    Raises:
        UnknownModelError: the request names another model.
        InvalidRequestError: the request is invalid; with every violation found.
        CapacityError: too many grammars wait to be compiled, in total or of this client.
        UnavailableError: it resumes a response to a prompt that another router tokenized
            differently, or of a version of its adapter that is gone.
    """
    adapters = facts.adapters_of(request.model, resumes=any(request.resumed_from))
    violations = [
        *unknown_fields(request),
        *_identity(request, most_urgent),
        *_session(request),
        *_prompt(request, facts, text_tokenizer),
        *_sampling(request.sampling, facts),
        *_stop(request, facts, text_tokenizer),
        *_structured_output(request),
        *resumed_violations(request, facts),
    ]
    if violations:
        raise InvalidRequestError(*violations)
    if (grammar := grammar_of(request)) is not None:
        if grammars is None:
            raise grammar.refused("needs a model with a tokenizer and an end-of-sequence token")
        await grammars.check(grammar, client)
    prompt = await _prompt_token_ids(request, text_tokenizer)
    violations = [
        *_context(request, facts, len(prompt)),
        *_encoded(request, facts, prompt, text_tokenizer),
    ]
    if violations:
        raise InvalidRequestError(*violations)
    resolved = _resolve(request, facts, prompt, new_seed, adapters[0])
    if resolved.resumed_from:
        routed = began_with(resolved.resumed_from, resolved.prompt, adapters)
        resolved.engine.adapter = routed.adapter
        workers = tuple(map(workers_of, resolved.resumed_from))
        resolved = replace(resolved, resumed_from=workers, routed=routed)
    resolved.engine.priority = _priority(request, most_urgent)
    return replace(resolved, client=client)


def _identity(
    request: generation_pb2.GenerateRequest, most_urgent: int
) -> Iterable[FieldViolation]:
    size = len(request.request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        yield FieldViolation("request_id", f"has {size} bytes, the limit is {MAX_REQUEST_ID_BYTES}")
    elif not request.request_id.isprintable():
        yield FieldViolation("request_id", "must consist of printable characters")
    if not most_urgent <= _priority(request, most_urgent) <= MAX_PRIORITY:
        yield FieldViolation(
            "priority",
            f"must be between {most_urgent} and {MAX_PRIORITY} for this client, "
            f"got {request.priority}",
        )
    if (size := len(request.cache_salt.encode())) > MAX_CACHE_SALT_BYTES:
        yield FieldViolation("cache_salt", f"has {size} bytes, the limit is {MAX_CACHE_SALT_BYTES}")
    for name in ("num_top_logprobs", "num_prompt_logprobs"):
        if (count := getattr(request, name)) > MAX_TOP_LOGPROBS:
            yield FieldViolation(name, f"must be at most {MAX_TOP_LOGPROBS}, got {count}")
    if request.HasField("n") and not 1 <= request.n <= MAX_CHOICES:
        yield FieldViolation("n", f"must be between 1 and {MAX_CHOICES}, got {request.n}")


def _session(request: generation_pb2.GenerateRequest) -> Iterable[FieldViolation]:
    if (size := len(request.session_id.encode())) > MAX_SESSION_ID_BYTES:
        yield FieldViolation("session_id", f"has {size} bytes, the limit is {MAX_SESSION_ID_BYTES}")
    elif not request.session_id.isprintable():
        yield FieldViolation("session_id", "must consist of printable characters")
    if request.HasField("kv_hints"):
        yield from hint_violations(request.kv_hints)


def _priority(request: generation_pb2.GenerateRequest, most_urgent: int) -> int:
    return request.priority or max(0, most_urgent)


def _prompt(
    request: generation_pb2.GenerateRequest,
    facts: ModelLimits,
    text_tokenizer: TextTokenizer | None,
) -> Iterable[FieldViolation]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        yield FieldViolation("prompt", "one of text, token_ids and chat must be given")
    elif kind == "token_ids":
        yield from _prompt_ids(request.token_ids.ids, facts)
    elif text_tokenizer is None:
        yield FieldViolation(
            kind, "the model has no tokenizer, the prompt must be given as token_ids"
        )
    elif kind == "chat":
        yield from _chat(request.chat, facts, text_tokenizer)
    elif not request.text:
        yield FieldViolation("text", "must not be empty")
    else:
        yield from _fits("text", len(request.text), facts, text_tokenizer)


def _prompt_ids(ids: Sequence[int], facts: ModelLimits) -> Iterable[FieldViolation]:
    if not ids:
        yield FieldViolation("token_ids.ids", "must not be empty")
    elif len(ids) >= facts.max_context_tokens:
        yield _too_long("token_ids", len(ids), facts)
    elif max(ids) >= facts.vocab_size:
        index, token_id = next(each for each in enumerate(ids) if each[1] >= facts.vocab_size)
        yield FieldViolation(f"token_ids.ids[{index}]", _not_in_vocabulary(token_id, facts))


def _chat(
    chat: generation_pb2.ChatMessages, facts: ModelLimits, text_tokenizer: TextTokenizer
) -> Iterable[FieldViolation]:
    if not text_tokenizer.has_chat_template:
        yield FieldViolation("chat", "the model has no chat template")
    yield from chat_violations(chat)
    if len(chat.messages) <= MAX_CHAT_MESSAGES:
        yield from _fits("chat.messages", num_characters(chat), facts, text_tokenizer)


def _fits(
    field: str, num_characters: int, facts: ModelLimits, text_tokenizer: TextTokenizer
) -> Iterable[FieldViolation]:
    if num_characters > text_tokenizer.longest_token * facts.max_context_tokens:
        yield FieldViolation(
            field,
            f"has {num_characters} characters, which cannot fit into the maximum context "
            f"length of {facts.max_context_tokens} tokens",
        )


def _sampling(sampling: types_pb2.SamplingParams, facts: ModelLimits) -> Iterable[FieldViolation]:
    for name, interval in SAMPLING_INTERVALS.items():
        if sampling.HasField(name) and (value := getattr(sampling, name)) not in interval:
            yield FieldViolation(f"sampling.{name}", f"{interval}, got {value:g}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        yield FieldViolation(
            "sampling.logit_bias",
            f"has {len(sampling.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS_ENTRIES}",
        )
        return
    for token_id, bias in sorted(sampling.logit_bias.items()):
        if token_id >= facts.vocab_size:
            yield FieldViolation(
                f"sampling.logit_bias[{token_id}]", _not_in_vocabulary(token_id, facts)
            )
        if bias not in LOGIT_BIAS_INTERVAL:
            yield FieldViolation(
                f"sampling.logit_bias[{token_id}]", f"{LOGIT_BIAS_INTERVAL}, got {bias:g}"
            )


def _stop(
    request: generation_pb2.GenerateRequest,
    facts: ModelLimits,
    text_tokenizer: TextTokenizer | None,
) -> Iterable[FieldViolation]:
    stop = request.stop
    if stop.HasField("max_tokens"):
        if stop.max_tokens < 1:
            yield FieldViolation("stop.max_tokens", "must be at least 1, got 0")
        elif stop.min_tokens > stop.max_tokens:
            yield FieldViolation(
                "stop.min_tokens",
                f"must be at most max_tokens ({stop.max_tokens}), got {stop.min_tokens}",
            )
    yield from _stop_strings(request, text_tokenizer)
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stop.stop_token_ids",
            f"has {len(stop.stop_token_ids)} entries, the limit is {MAX_STOP_TOKEN_IDS}",
        )
        return
    for index, token_id in enumerate(stop.stop_token_ids):
        if token_id >= facts.vocab_size:
            yield FieldViolation(
                f"stop.stop_token_ids[{index}]", _not_in_vocabulary(token_id, facts)
            )


def _stop_strings(
    request: generation_pb2.GenerateRequest, text_tokenizer: TextTokenizer | None
) -> Iterable[FieldViolation]:
    strings = request.stop.stop_strings
    if strings and request.skip_text:
        yield FieldViolation("stop.stop_strings", "cannot be found when skip_text is set")
    elif strings and text_tokenizer is None:
        yield FieldViolation("stop.stop_strings", "cannot be found, the model has no tokenizer")
    if len(strings) > MAX_STOP_STRINGS:
        yield FieldViolation(
            "stop.stop_strings", f"has {len(strings)} entries, the limit is {MAX_STOP_STRINGS}"
        )
    for index, string in enumerate(strings[:MAX_STOP_STRINGS]):
        if not string:
            yield FieldViolation(f"stop.stop_strings[{index}]", "must not be empty")
        elif (size := len(string.encode())) > MAX_STOP_STRING_BYTES:
            yield FieldViolation(
                f"stop.stop_strings[{index}]",
                f"has {size} bytes, the limit is {MAX_STOP_STRING_BYTES}",
            )


def _structured_output(request: generation_pb2.GenerateRequest) -> Iterable[FieldViolation]:
    if not request.HasField("structured_output"):
        return
    grammar = grammar_of(request)
    if grammar is None:
        yield FieldViolation("structured_output", "one of json_schema and regex must be given")
        return
    if not grammar.text:
        yield FieldViolation(grammar.field, "must not be empty")
    if (size := len(grammar.text.encode())) > MAX_GRAMMAR_BYTES:
        yield FieldViolation(grammar.field, f"has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}")
    if request.stop.min_tokens:
        yield FieldViolation(
            "stop.min_tokens",
            "cannot be combined with structured_output, which itself ends the text",
        )
    if request.stop.ignore_eos:
        yield FieldViolation(
            "stop.ignore_eos",
            "cannot be combined with structured_output, which ends with an end-of-sequence token",
        )


def grammar_of(request: generation_pb2.GenerateRequest) -> Grammar | None:
    """Return the grammar that the output must follow, None if the request has none."""
    kind = request.structured_output.WhichOneof("grammar")
    return (
        None
        if kind is None
        else Grammar.of(GrammarKind(kind), getattr(request.structured_output, kind))
    )


async def _prompt_token_ids(
    request: generation_pb2.GenerateRequest, text_tokenizer: TextTokenizer | None
) -> list[int]:
    if text_tokenizer is None or request.HasField("token_ids"):
        return list(request.token_ids.ids)
    if request.HasField("text"):
        return await text_tokenizer.encode_text(request.text)
    return await text_tokenizer.encode_chat(chat_of(request.chat))


def _context(
    request: generation_pb2.GenerateRequest, facts: ModelLimits, num_tokens: int
) -> Iterable[FieldViolation]:
    kind = request.WhichOneof("prompt") or "prompt"
    room = facts.max_context_tokens - num_tokens
    if num_tokens == 0:
        yield FieldViolation(kind, "must give at least one token")
    elif room < 1:
        yield _too_long(kind, num_tokens, facts)
    elif request.stop.min_tokens > room:
        yield FieldViolation(
            "stop.min_tokens",
            f"must be at most {room}, the part of the maximum context length of "
            f"{facts.max_context_tokens} tokens that the prompt leaves, "
            f"got {request.stop.min_tokens}",
        )
    else:
        yield from too_many_resumed(request, _max_tokens(request.stop, room))


def _encoded(
    request: generation_pb2.GenerateRequest,
    facts: ModelLimits,
    prompt: list[int],
    text_tokenizer: TextTokenizer | None,
) -> Iterable[FieldViolation]:
    """Yield a violation for text with tokens that the tokenizer has and the model has not.

    Text models lack, for example, the image tokens of their tokenizer.
    """
    kind = request.WhichOneof("prompt") or "prompt"
    if (
        text_tokenizer is None
        or kind == "token_ids"
        or not prompt
        or max(prompt) < facts.vocab_size
    ):
        return
    token_id = next(token_id for token_id in prompt if token_id >= facts.vocab_size)
    yield FieldViolation(
        "chat.messages" if kind == "chat" else kind,
        f"contains {_shown(text_tokenizer.token_text(token_id))}, a token of the tokenizer that the model "
        f"does not have: {_not_in_vocabulary(token_id, facts)}",
    )


def _max_tokens(stop: types_pb2.StopConditions, room: int) -> int:
    return min(stop.max_tokens, room) if stop.HasField("max_tokens") else room


def _resolve(
    request: generation_pb2.GenerateRequest,
    facts: ModelLimits,
    prompt: list[int],
    new_seed: Callable[[], int],
    adapter: str,
) -> AdmissibleRequest:
    stop = request.stop
    room = facts.max_context_tokens - len(prompt)
    eos = () if stop.ignore_eos else facts.eos_token_ids
    resumed = tuple(tuple(choice.ids) for choice in request.resumed)
    is_scored = request.HasField("num_prompt_logprobs") and not (resumed and resumed[0])
    engine = types_pb2.EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        sampling=resolved_sampling(request.sampling, facts),
        max_tokens=_max_tokens(stop, room),
        min_tokens=stop.min_tokens,
        stop_token_ids=sorted({*stop.stop_token_ids, *eos}),
        num_top_logprobs=request.num_top_logprobs if request.HasField("num_top_logprobs") else None,
        num_prompt_logprobs=request.num_prompt_logprobs if is_scored else None,
        structured_output=request.structured_output
        if request.HasField("structured_output")
        else None,
        speculate=request.speculate if request.HasField("speculate") else None,
        prefix_cache=request.prefix_cache if request.HasField("prefix_cache") else None,
        cache_salt=request.cache_salt,
        adapter=adapter,
    )
    if not engine.sampling.HasField("seed"):
        engine.sampling.seed = new_seed()
    return AdmissibleRequest(
        engine,
        tuple(stop.stop_strings),
        wants_text=not request.skip_text,
        num_choices=request.n if request.HasField("n") else 1,
        resumed=resumed,
        resumed_from=tuple(request.resumed_from),
        routed=prompt_of(engine, array("I", prompt)),
    )


def resolved_sampling(
    given: types_pb2.SamplingParams, facts: ModelLimits
) -> types_pb2.SamplingParams:
    """Return every parameter as it applies: the request's value, else the model's, else Baton's
    default.
    """
    sampling = types_pb2.SamplingParams(**{**SAMPLING_DEFAULTS, **facts.sampling})  # type: ignore[arg-type]
    sampling.MergeFrom(given)
    return sampling


def _too_long(field: str, num_tokens: int, facts: ModelLimits) -> FieldViolation:
    # Clients of OpenAI's API search for "maximum context length" to shorten what they sent.
    return FieldViolation(
        field,
        f"has {num_tokens} tokens; the maximum context length of {facts.max_context_tokens} "
        "tokens must leave room for at least one more",
    )


def _shown(text: str) -> str:
    return (
        repr(text) if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]!r}..."
    )


def _not_in_vocabulary(token_id: int, facts: ModelLimits) -> str:
    return f"{token_id} is not in the vocabulary of {facts.vocab_size} tokens"
