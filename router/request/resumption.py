"""An answer that another router began: the tokens its client has are checked before any work, and fed to the output, so
that what follows is what would have followed."""

import asyncio
from collections.abc import Iterable, Sequence

from protos import generation_pb2, types_pb2
from router.request.answer import Output
from router.text.model_facts import ModelLimits
from runtime.errors import FieldViolation, InvalidRequestError

FED_AT_ONCE = 256  # tokens; other requests go on between two lots


def resumed_violations(request: generation_pb2.GenerateRequest, facts: ModelLimits) -> Iterable[FieldViolation]:
    """What is wrong with `resumed` as far as that can be seen without the prompt."""
    num_choices = request.n if request.HasField("n") else 1
    if len(request.resumed) > num_choices:
        yield FieldViolation("resumed", f"has {len(request.resumed)} entries, the limit is one per choice: "
                                        f"{num_choices}")
        return
    for index, choice in enumerate(request.resumed):
        if choice.ids and max(choice.ids) >= facts.vocab_size:
            place, token_id = next((i, token_id) for i, token_id in enumerate(choice.ids)
                                   if token_id >= facts.vocab_size)
            yield FieldViolation(f"resumed[{index}].ids[{place}]",
                                 f"{token_id} is not in the vocabulary of {facts.vocab_size} tokens")


def too_many_resumed(request: generation_pb2.GenerateRequest, max_tokens: int) -> Iterable[FieldViolation]:
    """More tokens than the answer may have."""
    for index, choice in enumerate(request.resumed):
        if len(choice.ids) > max_tokens:
            yield FieldViolation(f"resumed[{index}].ids", f"has {len(choice.ids)} tokens, more than the {max_tokens} "
                                                          "that the answer may have")


async def feed(output: Output, token_ids: Sequence[int], engine: types_pb2.EngineRequest, index: int) -> None:
    """Let the output of choice `index` know what its client has.

    Raises:
        InvalidRequestError: the answer ends before the last of these tokens.
    """
    for start in range(0, len(token_ids), FED_AT_ONCE):
        output.add(types_pb2.TokenChunk(token_ids=token_ids[start:start + FED_AT_ONCE]))
        if output.stop_string is not None:
            break
        await asyncio.sleep(0)
    stops = frozenset(engine.stop_token_ids)
    stopped = (place + 1 for place, token_id in enumerate(token_ids) if token_id in stops)
    length = min(output.num_tokens, next(stopped, len(token_ids)))
    if length < len(token_ids):
        raise InvalidRequestError(FieldViolation(
            f"resumed[{index}].ids[{length}]", "follows the end of the answer: a stop string or token"))


def finish_of(token_ids: Sequence[int], engine: types_pb2.EngineRequest) -> generation_pb2.GenerateFinish | None:
    """How an answer of these tokens has ended, stop strings aside; None while it goes on."""
    if token_ids and token_ids[-1] in engine.stop_token_ids:
        return generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_STOP, stop_token_id=token_ids[-1])
    if len(token_ids) >= engine.max_tokens:
        return generation_pb2.GenerateFinish(reason=types_pb2.FINISH_REASON_LENGTH)
    return None
