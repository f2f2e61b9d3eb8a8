"""Values to protobuf messages and back: the only file of this package that sees generated types' fields."""

from collections.abc import Iterable
from dataclasses import fields

from baton.values import (
    ChatMessage,
    Chunk,
    ClusterStatus,
    Completion,
    Event,
    Finish,
    FinishReason,
    Load,
    ModelInfo,
    Prompt,
    PromptLogprobs,
    Query,
    Timings,
    TokenLogprobs,
    Usage,
    WorkerStatus,
)
from protos import generation_pb2 as pb
from protos import types_pb2
from runtime.errors import FieldViolation, InternalError, InvalidRequestError

_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}


def request_of(query: Query) -> pb.GenerateRequest:
    """Raises InvalidRequestError for values that have no place in a message, such as a negative count."""
    stop = query.stop
    try:
        request = pb.GenerateRequest(
            request_id=query.request_id,
            model=query.model,
            sampling=types_pb2.SamplingParams(**{f.name: getattr(query.sampling, f.name)
                                                 for f in fields(query.sampling)}),
            stop=types_pb2.StopConditions(max_tokens=stop.max_tokens, min_tokens=stop.min_tokens,
                                          stop_strings=stop.strings, stop_token_ids=stop.token_ids,
                                          ignore_eos=stop.ignore_eos),
            num_top_logprobs=query.num_top_logprobs,
            num_prompt_logprobs=query.num_prompt_logprobs,
            structured_output=_structured_output_of(query),
            n=query.n,
            priority=query.priority,
            skip_text=query.skip_text,
            speculate=query.speculate,
        )
        _set_prompt(request, query.prompt)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(FieldViolation("request", str(error))) from error
    return request


def _structured_output_of(query: Query) -> types_pb2.StructuredOutput | None:
    wanted = query.structured_output
    if wanted is None:
        return None
    if wanted.json_schema is not None and wanted.regex is not None:
        raise ValueError("structured_output takes a JSON schema or a regular expression, not both")
    return types_pb2.StructuredOutput(json_schema=wanted.json_schema, regex=wanted.regex)


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [item for item in prompt if isinstance(item, ChatMessage)]
    if messages:
        request.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in messages)
    else:
        request.token_ids.ids.extend(item for item in prompt if isinstance(item, int))
        request.token_ids.SetInParent()


def event_of(response: pb.GenerateResponse) -> Event:
    """Raises InternalError for an event this client does not know."""
    kind = response.WhichOneof("event")
    if kind == "chunk":
        chunk = response.chunk
        return Chunk(response.request_id, tuple(chunk.token_ids), chunk.text,
                     tuple(_logprobs_of(item) for item in chunk.logprobs), _usage_of(chunk.usage),
                     _prompt_logprobs_of(chunk.prompt_logprobs) if chunk.HasField("prompt_logprobs") else None,
                     response.index)
    if kind == "finish":
        return _finish_of(response)
    raise InternalError(f"the server sent an event this client does not know: {kind}")


def _finish_of(response: pb.GenerateResponse) -> Finish:
    finish = response.finish
    matched = finish.WhichOneof("matched")
    timings = {f.name: getattr(finish.timings, f.name) for f in fields(Timings) if finish.timings.HasField(f.name)}
    if finish.reason not in _REASONS:
        raise InternalError(f"the server sent a finish reason this client does not know: {finish.reason}")
    return Finish(
        request_id=response.request_id,
        reason=_REASONS[finish.reason],
        stop_string=finish.stop_string if matched == "stop_string" else None,
        stop_token_id=finish.stop_token_id if matched == "stop_token_id" else None,
        usage=_usage_of(finish.usage),
        timings=Timings(**timings),
        index=response.index,
    )


def _usage_of(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens)


def _logprobs_of(item: types_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(item.logprob, tuple((top.token_id, top.logprob) for top in item.top))


def _prompt_logprobs_of(item: types_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(item.first_position, tuple(item.token_ids),
                          tuple(_logprobs_of(logprobs) for logprobs in item.logprobs))


def completions_of(events: Iterable[Event]) -> tuple[Completion, ...]:
    """Every choice from the events of a stream, by index. Raises InternalError when one ended without a finish."""
    by_index: dict[int, list[Event]] = {}
    for event in events:
        by_index.setdefault(event.index, []).append(event)
    if not by_index:
        raise InternalError("the stream ended without a finish")
    return tuple(completion_of(by_index[index]) for index in sorted(by_index))


def completion_of(events: Iterable[Event]) -> Completion:
    """A whole answer from the events of its choice. Raises InternalError when the stream ended without a finish."""
    events = list(events)
    chunks = [event for event in events if isinstance(event, Chunk)]
    if not events or not isinstance(events[-1], Finish):
        raise InternalError("the stream ended without a finish")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(item for chunk in chunks for item in chunk.logprobs),
        finish=events[-1],
        prompt_logprobs=tuple(item for chunk in chunks if chunk.prompt_logprobs is not None
                              for item in chunk.prompt_logprobs.logprobs),
    )


def model_info_of(response: pb.GetModelInfoResponse) -> ModelInfo:
    values = {f.name: getattr(response, f.name) for f in fields(ModelInfo)}
    return ModelInfo(**{**values, "eos_token_ids": tuple(response.eos_token_ids)})


def load_of(response: pb.GetLoadResponse) -> Load:
    return Load(**{f.name: getattr(response, f.name) for f in fields(Load)})


def cluster_status_of(response: pb.GetClusterStatusResponse) -> ClusterStatus:
    return ClusterStatus(response.model, response.waiting_requests, response.running_requests,
                         tuple(_worker_of(worker) for worker in response.workers))


def _worker_of(worker: pb.WorkerStatus) -> WorkerStatus:
    values = {f.name: getattr(worker, f.name) for f in fields(WorkerStatus)}
    return WorkerStatus(**{**values, "stages": tuple(worker.stages)})
