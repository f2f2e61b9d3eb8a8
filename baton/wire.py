"""Conversion between values and protobuf messages.

No other file of this package reads fields of generated types.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.values import (
    ChatMessage,
    Chunk,
    ClusterStatus,
    Completion,
    DataRankStatus,
    Event,
    Finish,
    FinishReason,
    FlushedCache,
    Load,
    ModelInfo,
    PlacementCount,
    PromptLogprobs,
    Query,
    Sampling,
    StructuredOutput,
    Timings,
    TokenLogprobs,
    Usage,
    WorkerStatus,
)
from protos import generation_pb2 as pb
from protos import types_pb2
from runtime.errors import FieldViolation, InternalError, InvalidRequestError
from runtime.session_limits import MAX_RETENTION_S

KV_HINTS_VERSION = "0.1"

_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}

_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: "must be from -2^31 to 2^31 - 1: ",
    FieldDescriptor.CPPTYPE_UINT32: "must be from 0 to 2^32 - 1: ",
    FieldDescriptor.CPPTYPE_UINT64: "must be from 0 to 2^64 - 1: ",
}


def request_of(query: Query) -> pb.GenerateRequest:
    """Return the message of a query.

    Raises:
        InvalidRequestError: a value does not fit its field, such as a negative count; names the
            field.
    """
    request = pb.GenerateRequest()
    stop = query.stop
    request.sampling.SetInParent()
    _put(
        request.sampling,
        "sampling.",
        {f.name: getattr(query.sampling, f.name) for f in fields(query.sampling)},
    )
    request.stop.SetInParent()
    _put(
        request.stop,
        "stop.",
        {
            "max_tokens": stop.max_tokens,
            "min_tokens": stop.min_tokens,
            "stop_strings": stop.strings,
            "stop_token_ids": stop.token_ids,
            "ignore_eos": stop.ignore_eos,
        },
    )
    if query.structured_output is not None:
        _put_structured_output(request.structured_output, query.structured_output)
    _put(
        request,
        "",
        {
            "request_id": query.request_id,
            "model": query.model,
            "num_top_logprobs": query.num_top_logprobs,
            "num_prompt_logprobs": query.num_prompt_logprobs,
            "n": query.n,
            "priority": query.priority,
            "skip_text": query.skip_text,
            "speculate": query.speculate,
            "prefix_cache": query.prefix_cache,
            "cache_salt": query.cache_salt,
            "session_id": query.session_id,
        },
    )
    _put_prompt(request, query)
    _put_hints(request, query)
    for index, token_ids in enumerate(query.resumed):
        _put(request.resumed.add(), f"resumed[{index}].", {"ids": token_ids})
    _put(request, "", {"resumed_from": query.resumed_from})
    return request


def _put_hints(request: pb.GenerateRequest, query: Query) -> None:
    hints = dict[str, dict[str, object]]()
    if query.retention_s is not None:
        if not 0 <= query.retention_s <= MAX_RETENTION_S:
            limits = f"must be between 0 and {MAX_RETENTION_S:.0f}, got {query.retention_s}"
            raise InvalidRequestError(FieldViolation("retention_s", limits))
        hints["kv.retain"] = {"ttl_seconds": query.retention_s}
    if query.ends_session:
        hints["kv.evict"] = {}
    if not hints:
        return
    request.kv_hints.protocol_version = KV_HINTS_VERSION
    for name, payload in hints.items():
        request.kv_hints.actions.add(
            action_id=name,
            action_type=name,
            action_version=KV_HINTS_VERSION,
            payload=json.dumps(payload),
        )


def _put(message: Message, path: str, values: Mapping[str, object]) -> None:
    """Set fields of a message; None leaves a field unset. `path` is its place in the request."""
    for name, value in values.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        # Else each character would become an item.
        if isinstance(value, str | bytes) and field.is_repeated:
            raise InvalidRequestError(
                FieldViolation(path + name, f"must be a list, got {type(value).__name__}")
            )
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (ValueError, TypeError) as error:
            limits = _LIMITS.get(field.cpp_type, "")
            raise InvalidRequestError(FieldViolation(path + name, f"{limits}{error}")) from error


def _put_structured_output(message: types_pb2.StructuredOutput, wanted: StructuredOutput) -> None:
    if wanted.json_schema is not None and wanted.regex is not None:
        raise InvalidRequestError(
            FieldViolation(
                "structured_output", "takes a JSON schema or a regular expression, not both"
            )
        )
    message.SetInParent()
    _put(message, "structured_output.", {"json_schema": wanted.json_schema, "regex": wanted.regex})


def _put_prompt(request: pb.GenerateRequest, query: Query) -> None:
    prompt = query.prompt
    if prompt is None:
        raise InvalidRequestError(FieldViolation("prompt", "is missing"))
    messages = (
        []
        if isinstance(prompt, str)
        else [item for item in prompt if isinstance(item, ChatMessage)]
    )
    if messages:
        if len(messages) < len(prompt):
            raise InvalidRequestError(
                FieldViolation("prompt", "must be token ids or chat messages, not both")
            )
        _put_chat(request.chat, messages, query)
        return
    if query.tools or query.template_arguments or query.continue_final_message:
        raise InvalidRequestError(
            FieldViolation(
                "prompt",
                "must be chat messages if tools, template arguments or a continued message are "
                "given",
            )
        )
    if isinstance(prompt, str):
        _put(request, "", {"text": prompt})
    else:
        request.token_ids.SetInParent()
        _put(request.token_ids, "token_ids.", {"ids": prompt})


def _put_chat(chat: pb.ChatMessages, messages: Sequence[ChatMessage], query: Query) -> None:
    for index, message in enumerate(messages):
        _put_message(chat.messages.add(), f"chat.messages[{index}].", message)
    arguments = (
        _json_of("chat.template_arguments", query.template_arguments)
        if query.template_arguments
        else ""
    )
    _put(
        chat,
        "chat.",
        {
            "tools": [
                _json_of(f"chat.tools[{index}]", tool) for index, tool in enumerate(query.tools)
            ],
            "template_arguments": arguments,
            "continue_final_message": query.continue_final_message,
        },
    )


def _put_message(message: pb.ChatMessage, path: str, given: ChatMessage) -> None:
    if given.content is None and not given.tool_calls and not given.reasoning_content:
        raise InvalidRequestError(FieldViolation(f"{path}content", "is missing"))
    _put(
        message,
        path,
        {
            name: getattr(given, name)
            for name in ("role", "reasoning_content", "tool_call_id", "name")
        },
    )
    if given.content is None or isinstance(given.content, str):
        _put(message, path, {"content": given.content})
    else:
        for place, text in enumerate(given.content):
            _put(message.content_parts.add(), f"{path}content_parts[{place}].", {"text": text})
    for place, call in enumerate(given.tool_calls):
        _put(
            message.tool_calls.add(),
            f"{path}tool_calls[{place}].",
            {"id": call.id, "name": call.name, "arguments": call.arguments},
        )


def _json_of(field: str, value: Mapping[str, object]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            FieldViolation(field, f"cannot be written as JSON: {error}")
        ) from error


def event_of(response: pb.GenerateResponse) -> Event:
    """Return the event of a response, or raise InternalError if it is unknown."""
    kind = response.WhichOneof("event")
    if kind == "chunk":
        chunk = response.chunk
        return Chunk(
            response.request_id,
            tuple(chunk.token_ids),
            chunk.text,
            tuple(_logprobs_of(item) for item in chunk.logprobs),
            _usage_of(chunk.usage),
            _prompt_logprobs_of(chunk.prompt_logprobs)
            if chunk.HasField("prompt_logprobs")
            else None,
            response.index,
            chunk.compatibility,
        )
    if kind == "finish":
        return _finish_of(response)
    raise InternalError(f"the server sent an unknown event: {kind}")


def _finish_of(response: pb.GenerateResponse) -> Finish:
    finish = response.finish
    matched = finish.WhichOneof("matched")
    timings = {
        f.name: getattr(finish.timings, f.name)
        for f in fields(Timings)
        if finish.timings.HasField(f.name)
    }
    if finish.reason not in _REASONS:
        raise InternalError(f"the server sent an unknown finish reason: {finish.reason}")
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
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.pulled_tokens,
        usage.disk_tokens,
        usage.host_tokens,
        usage.server_tokens,
    )


def _logprobs_of(item: types_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(item.logprob, tuple((top.token_id, top.logprob) for top in item.top))


def _prompt_logprobs_of(item: types_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        item.first_position,
        tuple(item.token_ids),
        tuple(_logprobs_of(logprobs) for logprobs in item.logprobs),
    )


def completions_of(events: Iterable[Event]) -> tuple[Completion, ...]:
    """Return every choice of a stream, by index.

    Raises:
        InternalError: a choice ended without a finish.
    """
    by_index: dict[int, list[Event]] = {}
    for event in events:
        by_index.setdefault(event.index, []).append(event)
    if not by_index:
        raise InternalError("the stream ended without a finish")
    return tuple(completion_of(by_index[index]) for index in sorted(by_index))


def completion_of(events: Iterable[Event]) -> Completion:
    """Return the whole response of one choice from its events.

    Raises:
        InternalError: the stream ended without a finish.
    """
    events = list(events)
    chunks = [event for event in events if isinstance(event, Chunk)]
    if not events or not isinstance(events[-1], Finish):
        raise InternalError("the stream ended without a finish")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(item for chunk in chunks for item in chunk.logprobs),
        finish=events[-1],
        prompt_logprobs=tuple(
            item
            for chunk in chunks
            if chunk.prompt_logprobs is not None
            for item in chunk.prompt_logprobs.logprobs
        ),
    )


def model_info_of(response: pb.GetModelInfoResponse) -> ModelInfo:
    values = {f.name: getattr(response, f.name) for f in fields(ModelInfo)}
    return ModelInfo(
        **{
            **values,
            "eos_token_ids": tuple(response.eos_token_ids),
            "adapters": tuple(response.adapters),
            "default_sampling": _sampling_of(response.default_sampling),
        }
    )


def _sampling_of(message: types_pb2.SamplingParams) -> Sampling:
    return Sampling(
        **{
            f.name: getattr(message, f.name)
            for f in fields(Sampling)
            if f.name != "logit_bias" and message.HasField(f.name)
        }
    )


def load_of(response: pb.GetLoadResponse) -> Load:
    return Load(**{f.name: getattr(response, f.name) for f in fields(Load)})


def cluster_status_of(response: pb.GetClusterStatusResponse) -> ClusterStatus:
    return ClusterStatus(
        response.model,
        response.waiting_requests,
        response.running_requests,
        tuple(_worker_of(worker) for worker in response.workers),
        response.waiting_tokens,
        response.admitted_requests,
        tuple(PlacementCount(each.kind, each.why, each.requests) for each in response.placements),
    )


def flushed_caches_of(response: pb.FlushCachesResponse) -> tuple[FlushedCache, ...]:
    return tuple(
        FlushedCache(each.role, each.address, each.pages, each.error) for each in response.workers
    )


def _worker_of(worker: pb.WorkerStatus) -> WorkerStatus:
    values = {f.name: getattr(worker, f.name) for f in fields(WorkerStatus)}
    ranks = tuple(
        DataRankStatus(
            each.queued_requests, each.running_requests, each.pages_free, each.slots_free
        )
        for each in worker.data_ranks
    )
    lists = {name: tuple(values[name]) for name in ("stages", "able_roles", "roles")}
    return WorkerStatus(**{**values, **lists, "data_ranks": ranks})
