"""Conversion of requests and tokens between the wire and the engine.

The router has validated requests. A worker validates everything again that could make it fail,
because clients other than routers may reach its port.
"""

import math
from collections.abc import Iterator, Sequence

from engine.core.request import (
    NAMELESS,
    CacheSession,
    ClientShare,
    Request,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
)
from pool.pipeline.grammars import NO_GRAMMARS, GrammarCheck, grammar_from_proto
from protos import types_pb2 as pb
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.grammar import MAX_GRAMMAR_BYTES
from runtime.rpc.unknown_fields import unknown_fields
from runtime.session_limits import DIGEST_BYTES, MAX_RETENTION_S, MAX_WEIGHT, MIN_WEIGHT

MAX_TOP_LOGPROBS = 20
MAX_LISTED_TOKENS = 1024  # biases, and stop tokens; routers accept fewer stop tokens


def request_from_proto(
    message: pb.EngineRequest,
    *,
    vocab_size: int,
    max_context_tokens: int,
) -> Request:
    """Return the request of a message.

    Raises:
        InvalidRequestError: every field that this pool cannot serve.
    """
    violations = list(_violations(message, vocab_size, max_context_tokens))
    if violations:
        raise InvalidRequestError(*violations)
    return Request(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        max_tokens=message.max_tokens,
        sampling=_sampling(message.sampling),
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        num_top_logprobs=message.num_top_logprobs if message.HasField("num_top_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs
        if message.HasField("num_prompt_logprobs")
        else None,
        grammar=grammar_from_proto(message.structured_output)
        if message.HasField("structured_output")
        else None,
        priority=message.priority,
        speculates=message.speculate or not message.HasField("speculate"),
        uses_cache=message.prefix_cache or not message.HasField("prefix_cache"),
        cache_salt=message.cache_salt,
        adapter=message.adapter,
        session=_session(message.session) if message.HasField("session") else None,
        share=ClientShare(message.share.client, message.share.weight)
        if message.HasField("share")
        else NAMELESS,
    )


def _session(session: pb.CacheSession) -> CacheSession:
    return CacheSession(session.digest, session.client, session.retention_s, session.ends)


async def check_grammar(request: Request, grammars: GrammarCheck | None) -> None:
    """Compile the request's grammar on the stage that samples, before any other work.

    Raises:
        InvalidRequestError: the grammar is invalid or compiles too slowly, or the model has no
            tokenizer.
        CapacityError: too many other grammars wait to be compiled.
        UnavailableError: the stage that samples is lost.
    """
    if request.grammar is None:
        return
    if grammars is None:
        raise request.grammar.refused(NO_GRAMMARS)
    await grammars.check(request.grammar)


def in_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids as a tuple.

    Raises:
        InvalidRequestError: an id is outside the vocabulary.
    """
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            FieldViolation(
                field, f"token id {max(token_ids)} is outside the vocabulary of {vocab_size}"
            )
        )
    return tuple(token_ids)


def chunk_to_proto(*tokens: SampledToken) -> pb.TokenChunk:
    """Return the tokens of one step: several if draft tokens were accepted."""
    chunk = pb.TokenChunk()
    extend_chunk(chunk, tokens)
    return chunk


def extend_chunk(chunk: pb.TokenChunk, tokens: Sequence[SampledToken]) -> None:
    """Append tokens to a chunk."""
    chunk.token_ids.extend([token.token_id for token in tokens])
    for token in tokens:
        if token.logprobs is not None:
            chunk.logprobs.append(_logprobs_to_proto(token.logprobs))


def scores_to_proto(first_position: int, tokens: Sequence[SampledToken]) -> pb.PromptLogprobs:
    """Return the scored tokens of a prompt, the first of them at `first_position`."""
    return pb.PromptLogprobs(
        first_position=first_position,
        token_ids=[token.token_id for token in tokens],
        logprobs=[_logprobs_to_proto(token.logprobs) for token in tokens if token.logprobs],
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        top=[pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top],
    )


def _violations(
    message: pb.EngineRequest, vocab_size: int, max_context_tokens: int
) -> list[FieldViolation]:
    prompt = message.prompt_token_ids
    found = unknown_fields(message)
    if not prompt:
        found.append(FieldViolation("prompt_token_ids", "must not be empty"))
    if message.max_tokens < 1:
        found.append(FieldViolation("max_tokens", "must be at least 1"))
    if len(prompt) + message.max_tokens > max_context_tokens:
        found.append(
            FieldViolation(
                "prompt_token_ids",
                f"{len(prompt)} tokens and max_tokens {message.max_tokens} "
                f"are over the maximum context length of {max_context_tokens}",
            )
        )
    for field, ids, limit in (
        ("prompt_token_ids", prompt, max_context_tokens),
        ("stop_token_ids", message.stop_token_ids, MAX_LISTED_TOKENS),
        ("sampling.logit_bias", message.sampling.logit_bias, MAX_LISTED_TOKENS),
    ):
        if len(ids) > limit:  # checked before the ids: a million ids take 60 ms
            found.append(FieldViolation(field, f"has {len(ids)} entries, the limit is {limit}"))
        elif ids and max(ids) >= vocab_size:
            found.append(
                FieldViolation(
                    field, f"token id {max(ids)} is outside the vocabulary of {vocab_size}"
                )
            )
    for field, count in (
        ("num_top_logprobs", message.num_top_logprobs),
        ("num_prompt_logprobs", message.num_prompt_logprobs),
    ):
        if count > MAX_TOP_LOGPROBS:
            found.append(FieldViolation(field, f"must be at most {MAX_TOP_LOGPROBS}"))
    output = message.structured_output
    if len((output.json_schema or output.regex).encode()) > MAX_GRAMMAR_BYTES:
        found.append(
            FieldViolation("structured_output", f"must have at most {MAX_GRAMMAR_BYTES} bytes")
        )
    return [
        *found,
        *_session_violations(message),
        *_share_violations(message),
        *_sampling_violations(message.sampling),
    ]


def _share_violations(message: pb.EngineRequest) -> Iterator[FieldViolation]:
    if not message.HasField("share"):
        return
    client, weight = message.share.client, message.share.weight
    if len(client) != DIGEST_BYTES:
        yield FieldViolation("share.client", f"must have {DIGEST_BYTES} bytes, got {len(client)}")
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        yield FieldViolation(
            "share.weight", f"must be between {MIN_WEIGHT} and {MAX_WEIGHT}, got {weight}"
        )


def _session_violations(message: pb.EngineRequest) -> Iterator[FieldViolation]:
    if not message.HasField("session"):
        return
    session = message.session
    for field, name in (("digest", session.digest), ("client", session.client)):
        if len(name) != DIGEST_BYTES:
            yield FieldViolation(
                f"session.{field}", f"must have {DIGEST_BYTES} bytes, got {len(name)}"
            )
    if not 0 <= session.retention_s <= MAX_RETENTION_S:
        yield FieldViolation(
            "session.retention_s",
            f"must be between 0 and {MAX_RETENTION_S:.0f}, got {session.retention_s}",
        )


def _sampling_violations(sampling: pb.SamplingParams) -> Iterator[FieldViolation]:
    for descriptor, value in sampling.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            yield FieldViolation(
                f"sampling.{descriptor.name}", f"must be a finite number, got {value}"
            )
    if sampling.temperature < 0:
        yield FieldViolation(
            "sampling.temperature", f"must not be negative, got {sampling.temperature}"
        )


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters; absent fields keep the engine's defaults, zero is zero."""
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "seed",
    )
    given = {
        name: value
        for descriptor, value in message.ListFields()
        if (name := descriptor.name) in names
    }
    return SamplingParams(**given, logit_bias=tuple(sorted(message.logit_bias.items())))
