"""Translation between `vllm.grpc.engine.VllmEngine` and `baton.v1.Generation`. Pure.

That contract gives most sampling fields no presence: zero means absent there, and so it does here.
An absent field gets Baton's default, not the model's. Gateways receive the model's
(`default_sampling_params_json`) and send it themselves, and a client's zero for "all tokens" looks
like an absent field. Fields that Baton does not support are rejected by name, unless ignoring them
changes nothing (`skip_special_tokens` and similar ones shape text, and this service returns token
ids). They are rejected as bad requests: gateways turn UNIMPLEMENTED into a server error, which
clients retry.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from protos import generation_pb2 as pb
from protos import types_pb2
from router.api.vllm_chats import put_carried
from router.request.validate import MAX_LOGIT_BIAS_ENTRIES
from runtime.errors import FieldViolation, InvalidRequestError
from runtime.sampling_limits import SAMPLING_DEFAULTS

_WITHOUT_PRESENCE = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_UNSUPPORTED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
_UNSUPPORTED_SAMPLING = ("truncate_prompt_tokens", "grammar", "structural_tag")
_REGEX_SYNTAX = frozenset("\\.+*?()|[]{}^$")
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORTED: "abort",
}
# That contract's names of Baton's fields; the longest prefix applies.
_THEIR_NAMES = {
    "token_ids.ids": "tokenized.input_ids",
    "token_ids": "tokenized.input_ids",
    "prompt": "input",
    "text": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "sampling": "sampling_params",
    "stop": "sampling_params",
    "stop.stop_strings": "sampling_params.stop",
    "n": "sampling_params.n",
    "num_top_logprobs": "sampling_params.logprobs",
    "num_prompt_logprobs": "sampling_params.prompt_logprobs",
    "structured_output": "sampling_params",
}


def request_from_vllm(
    request: vllm.GenerateRequest, carried: str | None = None
) -> pb.GenerateRequest:
    """Return the request in Baton's terms. `carried` is the text that the token ids carry, if any.

    Raises:
        InvalidRequestError: a field is invalid; the error uses that contract's field names.
    """
    _refuse_unsupported(request, carried)
    params = request.sampling_params
    wanted = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(params),
        skip_text=not params.stop,
        stop=types_pb2.StopConditions(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            min_tokens=params.min_tokens or None,
            stop_strings=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos or None,
        ),
        n=params.n or None,
        num_top_logprobs=_count(params, "logprobs"),
        num_prompt_logprobs=_count(params, "prompt_logprobs"),
        structured_output=_structured_output(params),
    )
    if carried is not None:
        put_carried(wanted, carried)
    elif request.HasField("tokenized"):
        wanted.token_ids.ids.extend(request.tokenized.input_ids)
        wanted.token_ids.SetInParent()
    elif request.HasField("text"):
        wanted.text = request.text
    return wanted


def error_for_vllm(error: InvalidRequestError) -> InvalidRequestError:
    """Return the same error with that contract's field names."""
    return type(error)(
        *(FieldViolation(_their_name(v.field), v.description) for v in error.violations)
    )


def _their_name(field: str) -> str:
    known = [
        ours for ours in _THEIR_NAMES if field == ours or field.startswith((f"{ours}.", f"{ours}["))
    ]
    if not known:
        return field
    ours = max(known, key=len)
    return _THEIR_NAMES[ours] + field[len(ours) :]


def _refuse_unsupported(request: vllm.GenerateRequest, carried: str | None) -> None:
    params = request.sampling_params
    fields = [name for name in _UNSUPPORTED if request.HasField(name)]
    fields += ["extra_mm_inputs"] if request.extra_mm_inputs else []
    fields += ["data_parallel_rank"] if request.data_parallel_rank else []
    fields += [f"sampling_params.{name}" for name in _UNSUPPORTED_SAMPLING if params.HasField(name)]
    if params.HasField("prompt_logprobs") and (
        carried is not None or not request.HasField("tokenized")
    ):
        # The first entry of prompt logprobs is the first token's id, which needs token ids.
        fields.append("sampling_params.prompt_logprobs")
    if fields:
        raise InvalidRequestError(
            *(FieldViolation(name, "is not supported here") for name in fields)
        )


def _sampling(params: vllm.SamplingParams) -> types_pb2.SamplingParams:
    if len(params.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(
            FieldViolation(
                "sampling_params.logit_bias",
                f"has {len(params.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS_ENTRIES}",
            )
        )
    negative = [token_id for token_id in params.logit_bias if token_id < 0]
    if negative:
        raise InvalidRequestError(
            FieldViolation(f"sampling_params.logit_bias[{negative[0]}]", "is no token id")
        )
    given = {name: value for name in _WITHOUT_PRESENCE if (value := getattr(params, name))}
    if params.HasField("temperature"):
        given["temperature"] = params.temperature
    return types_pb2.SamplingParams(
        **(SAMPLING_DEFAULTS | given),
        seed=params.seed % 2**64 if params.HasField("seed") else None,
        logit_bias=dict(params.logit_bias),
    )


def _count(params: vllm.SamplingParams, name: str) -> int | None:
    if not params.HasField(name):
        return None
    count: int = getattr(params, name)
    if count < 0:
        raise InvalidRequestError(
            FieldViolation(
                f"sampling_params.{name}",
                "of the whole vocabulary are not offered, give a number of alternatives",
            )
        )
    return count


def _structured_output(params: vllm.SamplingParams) -> types_pb2.StructuredOutput | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return types_pb2.StructuredOutput(json_schema=params.json_schema)
        case "json_object" if params.json_object:
            return types_pb2.StructuredOutput(json_schema=json.dumps({"type": "object"}))
        case "regex":
            return types_pb2.StructuredOutput(regex=params.regex)
        case "choice":
            if not params.choice.choices:
                raise InvalidRequestError(
                    FieldViolation("sampling_params.choice.choices", "must not be empty")
                )
            return types_pb2.StructuredOutput(regex="|".join(map(_literal, params.choice.choices)))
    return None


def _literal(text: str) -> str:
    return "".join(
        f"\\{character}" if character in _REGEX_SYNTAX else character for character in text
    )


class _HeldChunk:
    """Chunks of one choice whose text is empty so far or ends inside a character."""

    def __init__(self) -> None:
        self.chunk = pb.GenerateChunk()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def add(self, chunk: pb.GenerateChunk, spelled: Iterable[bytes]) -> bool:
        """Add a chunk; return whether the text of all chunks is complete now."""
        self.chunk.MergeFrom(chunk)
        self._text += "".join(map(self._decoder.decode, spelled))
        is_inside = bool(self._decoder.getstate()[0]) or self._text.endswith("\ufffd")
        return bool(self._text) and not is_inside


class VllmAnswer:
    """One request's response in that contract's terms, from the ordered responses of
    `baton.v1.Generation`.
    """

    def __init__(
        self, request: vllm.GenerateRequest, bytes_of: Callable[[int], bytes] | None = None
    ) -> None:
        """`bytes_of` returns the bytes that a token adds to a text.

        With it, tokens of a stream with logprobs are held until their character is complete,
        because gateways drop the logprobs of chunks without text.
        """
        self._stream = request.stream
        self._bytes_of = (
            bytes_of if request.stream and request.sampling_params.HasField("logprobs") else None
        )
        self._held: dict[int, _HeldChunk] = {}  # by choice
        self._input_logprobs = (
            _first_input(request) if request.sampling_params.HasField("prompt_logprobs") else None
        )
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, vllm.OutputLogProbs] = {}

    def add(self, response: pb.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """Yield the messages to send for this response."""
        if response.HasField("finish"):
            if (held := self._held.pop(response.index, None)) is not None:
                yield from self._add_chunk(response.index, held.chunk)
            yield vllm.GenerateResponse(complete=self._complete(response.index, response.finish))
        elif self._bytes_of is None or not response.chunk.token_ids:
            yield from self._add_chunk(response.index, response.chunk)
        else:
            held = self._held.setdefault(response.index, _HeldChunk())
            if held.add(response.chunk, map(self._bytes_of, response.chunk.token_ids)):
                yield from self._add_chunk(response.index, self._held.pop(response.index).chunk)

    def _add_chunk(self, index: int, chunk: pb.GenerateChunk) -> Iterator[vllm.GenerateResponse]:
        if chunk.HasField("prompt_logprobs") and self._input_logprobs is not None:
            _add_input(self._input_logprobs, chunk.prompt_logprobs)
        if not chunk.token_ids:
            return
        logprobs = _output_logprobs(chunk)
        self._tokens.setdefault(index, []).extend(chunk.token_ids)
        if not self._stream:
            self._logprobs.setdefault(index, vllm.OutputLogProbs()).MergeFrom(logprobs)
            return
        yield vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=chunk.token_ids,
                prompt_tokens=chunk.usage.prompt_tokens,
                completion_tokens=chunk.usage.completion_tokens,
                cached_tokens=chunk.usage.cached_tokens,
                index=index,
                output_logprobs=logprobs if chunk.logprobs else None,
                input_logprobs=self._take_input(index),
            )
        )

    def _complete(self, index: int, finish: pb.GenerateFinish) -> vllm.GenerateComplete:
        matched: Mapping[str, object] = {}
        if finish.HasField("stop_string"):
            matched = {"matched_stop_str": finish.stop_string}
        elif finish.HasField("stop_token_id"):
            matched = {"matched_token_id": finish.stop_token_id}
        logprobs = self._logprobs.get(index)
        return vllm.GenerateComplete(
            output_ids=self._tokens.get(index, []),
            finish_reason=_FINISH_REASONS[finish.reason],
            prompt_tokens=finish.usage.prompt_tokens,
            completion_tokens=finish.usage.completion_tokens,
            cached_tokens=finish.usage.cached_tokens,
            index=index,
            output_logprobs=logprobs if logprobs is not None and logprobs.token_ids else None,
            input_logprobs=self._take_input(index),
            **matched,
        )

    def _take_input(self, index: int) -> vllm.InputLogProbs | None:
        """Return the prompt logprobs once, for the first message of choice 0."""
        if index:
            return None
        taken = self._input_logprobs
        self._input_logprobs = None
        return taken


def _output_logprobs(chunk: pb.GenerateChunk) -> vllm.OutputLogProbs:
    if not chunk.logprobs:
        return vllm.OutputLogProbs()
    return vllm.OutputLogProbs(
        token_logprobs=[item.logprob for item in chunk.logprobs],
        token_ids=chunk.token_ids,
        top_logprobs=[_top(item) for item in chunk.logprobs],
    )


def _first_input(request: vllm.GenerateRequest) -> vllm.InputLogProbs:
    """Return the entry of the prompt's first token, which has no value."""
    return vllm.InputLogProbs(
        token_ids=request.tokenized.input_ids[:1],
        token_logprobs=[vllm.InputTokenLogProb()],
        top_logprobs=[vllm.TopLogProbs()],
    )


def _add_input(into: vllm.InputLogProbs, scores: types_pb2.PromptLogprobs) -> None:
    into.token_ids.extend(scores.token_ids)
    into.token_logprobs.extend(
        vllm.InputTokenLogProb(value=item.logprob) for item in scores.logprobs
    )
    into.top_logprobs.extend(map(_top, scores.logprobs))


def _top(item: types_pb2.TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[top.logprob for top in item.top], token_ids=[top.token_id for top in item.top]
    )
