"""A response that another router began: validation of its tokens, and what they mean here."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from protos import generation_pb2, types_pb2
from router.request.answer import Output
from router.text.model_facts import ModelLimits
from router.workers.prefix_index import RoutedPrompt
from runtime.errors import FieldViolation, InvalidRequestError, UnavailableError

MAX_COMPATIBILITY_CHARS = 256
FED_AT_ONCE = 256  # tokens; other requests run between two batches
OF_PROMPT = "@"  # separates compatibility and prompt digest in `resumed_from`


def workers_of(sampled_by: str) -> str:
    """Return the compatibility in a `resumed_from` value."""
    return sampled_by.partition(OF_PROMPT)[0]


def began_with(
    sampled_by: Sequence[str], prompt: RoutedPrompt, adapters: Sequence[str]
) -> RoutedPrompt:
    """Return the prompt with the one of `adapters`, versions of one, that the response began with.

    `sampled_by` are the `resumed_from` values of its choices.

    Raises:
        UnavailableError: tokens were sampled for another prompt, or with none of the adapters.
    """
    digests = [value.partition(OF_PROMPT)[2] for value in sampled_by]
    for adapter in adapters:
        version = prompt if adapter == prompt.adapter else replace(prompt, adapter=adapter)
        if all(digest in ("", version.digest) for digest in digests):
            return version
    index, digest = next(
        (index, digest) for index, digest in enumerate(digests) if digest not in ("", prompt.digest)
    )
    raise UnavailableError(
        f"resumed_from[{index}]: the response began for a prompt with the digest {digest}, and this "
        f"router makes {prompt.digest} of the request: it has another chat template or tokenizer, "
        "its adapter has changed, or the request differs"
    )


def resumed_violations(
    request: generation_pb2.GenerateRequest, facts: ModelLimits
) -> Iterable[FieldViolation]:
    """Yield the violations of `resumed` that can be found without the prompt."""
    num_choices = request.n if request.HasField("n") else 1
    if len(request.resumed) > num_choices:
        yield FieldViolation(
            "resumed",
            f"has {len(request.resumed)} entries, the limit is one per choice: {num_choices}",
        )
        return
    if len(request.resumed_from) > len(request.resumed):
        yield FieldViolation(
            "resumed_from",
            f"has {len(request.resumed_from)} entries, the limit is one per entry of "
            f"resumed: {len(request.resumed)}",
        )
    for index, name in enumerate(request.resumed_from):
        if len(name) > MAX_COMPATIBILITY_CHARS:
            yield FieldViolation(
                f"resumed_from[{index}]",
                f"has {len(name)} characters, the limit is {MAX_COMPATIBILITY_CHARS}",
            )
    for index, choice in enumerate(request.resumed):
        if len(choice.ids) > facts.max_context_tokens:
            yield FieldViolation(
                f"resumed[{index}].ids",
                f"has {len(choice.ids)} tokens, the maximum context length "
                f"is {facts.max_context_tokens}",
            )
        elif choice.ids and max(choice.ids) >= facts.vocab_size:
            place, token_id = next(
                (i, token_id)
                for i, token_id in enumerate(choice.ids)
                if token_id >= facts.vocab_size
            )
            yield FieldViolation(
                f"resumed[{index}].ids[{place}]",
                f"{token_id} is not in the vocabulary of {facts.vocab_size} tokens",
            )


def too_many_resumed(
    request: generation_pb2.GenerateRequest, max_tokens: int
) -> Iterable[FieldViolation]:
    """Yield a violation for each choice that resumes more tokens than the response may have."""
    for index, choice in enumerate(request.resumed):
        if len(choice.ids) > max_tokens:
            yield FieldViolation(
                f"resumed[{index}].ids",
                f"has {len(choice.ids)} tokens, more than the {max_tokens} "
                "that the response may have",
            )


async def feed(
    output: Output, token_ids: Sequence[int], engine: types_pb2.EngineRequest, index: int
) -> None:
    """Feed the output of choice `index` with the tokens that its client has.

    Raises:
        InvalidRequestError: the response ends before the last of these tokens.
    """
    for start in range(0, len(token_ids), FED_AT_ONCE):
        output.add(types_pb2.TokenChunk(token_ids=token_ids[start : start + FED_AT_ONCE]))
        if output.stop_string is not None:
            break
        await asyncio.sleep(0)
    stops = frozenset(engine.stop_token_ids)
    stopped = (place + 1 for place, token_id in enumerate(token_ids) if token_id in stops)
    length = min(output.num_tokens, next(stopped, len(token_ids)))
    if length < len(token_ids):
        raise InvalidRequestError(
            FieldViolation(
                f"resumed[{index}].ids[{length}]",
                "follows the end of the response: a stop string or token",
            )
        )


def finish_of(
    token_ids: Sequence[int], engine: types_pb2.EngineRequest
) -> generation_pb2.GenerateFinish | None:
    """Return how a response of these tokens ended, stop strings aside; None while it goes on."""
    if token_ids and token_ids[-1] in engine.stop_token_ids:
        return generation_pb2.GenerateFinish(
            reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token_ids[-1]
        )
    if len(token_ids) >= engine.max_tokens:
        return generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_LENGTH)
    return None
