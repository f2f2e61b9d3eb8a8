"""Requests and responses of a client as plain values.

Only `baton.wire` sees the generated protobuf types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class ToolCall:
    """Tool call of an assistant's message; `arguments` is a JSON object as text."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class ChatMessage:
    """Message of a chat.

    `role` is a role of the model's chat template: user, assistant, system or tool. `content` is a
    text, a tuple of the text parts of OpenAI's API, or None in a message with calls. `tool_call_id`
    names the call that a tool message responds to.
    """

    role: str
    content: str | tuple[str, ...] | None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; None selects the server's default, 0 means 0.

    Ranges: protos/baton/v1/types.proto.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Conditions that end generation, besides end-of-sequence tokens and the context limit."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None


@dataclass(frozen=True)
class StructuredOutput:
    """Constraint on the whole output: a JSON schema (as JSON text) or a regular expression."""

    json_schema: str | None = None
    regex: str | None = None


# Text, token ids, or the messages of a chat.
Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Query:
    """One request.

    An empty `request_id` lets the server choose one; an empty `model` selects the served model.
    `speculate=False` disables speculative decoding and `prefix_cache=False` the reuse of cached
    prompts; both change only the speed. Requests share cached pages only with requests of the same
    `cache_salt`.

    Turns of one conversation share a `session_id`: caches keep what the newest turn left for
    `retention_s` longer (300 s unless given), and what earlier ones left for shorter. With
    `ends_session` no turn will follow. None of them changes the response.

    `resumed` continues a response of which these tokens have arrived, per choice
    (protos/baton/v1/generation.proto). A client does so for responses that it began.

    For chats: `tools` the model may call, in the form of OpenAI's API; `template_arguments` of the
    chat template; `continue_final_message` continues the last message. Calls and reasoning arrive
    as the text that the model writes.
    """

    prompt: Prompt
    sampling: Sampling = Sampling()
    stop: Stop = Stop()
    request_id: str = ""
    model: str = ""
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    n: int | None = None  # choices; each has its own seed, see protos/baton/v1/generation.proto
    priority: int = 0
    skip_text: bool = False
    speculate: bool | None = None
    prefix_cache: bool | None = None
    cache_salt: str = ""
    session_id: str = ""
    retention_s: float | None = None
    ends_session: bool = False
    resumed: tuple[tuple[int, ...], ...] = ()
    resumed_from: tuple[str, ...] = ()  # `Chunk.compatibility` of each resumed choice
    tools: tuple[Mapping[str, object], ...] = ()
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    continue_final_message: bool = False


class FinishReason(StrEnum):
    """Reason why a response ended: stop token or text, token limit, or abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt were reused, not computed.

    Of those, a worker copied `pulled_tokens` from another one, `host_tokens` from host memory to its
    device, `disk_tokens` from disk and `server_tokens` from a cache server.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    pulled_tokens: int = 0
    disk_tokens: int = 0
    host_tokens: int = 0
    server_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities; `top` is (token id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of prompt tokens from `first_position` on; the first token of a prompt has none."""

    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Timings:
    """Seconds per part of the request; None if the part did not happen."""

    router_queue_s: float | None = None
    prefill_queue_s: float | None = None
    prefill_s: float | None = None
    reserve_s: float | None = None
    transfer_exposed_s: float | None = None
    decode_queue_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens generated in one step.

    `text` may lag: it holds whole characters only, and never part of a stop string.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    index: int = 0  # of the choice
    compatibility: str = ""  # of the workers; set in the first chunks with scores and with tokens


@dataclass(frozen=True)
class Finish:
    """Last event of a choice.

    `stop_string` or `stop_token_id` is set if one of them ended it.
    """

    request_id: str
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    index: int = 0  # of the choice


Event = Chunk | Finish


@dataclass(frozen=True)
class Completion:
    """Whole response of a choice.

    `prompt_logprobs` are those of positions 1 and up, if requested and this is choice 0.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """Served model and its limits."""

    model: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
    revision: str
    default_sampling: Sampling = Sampling()  # used for requests that set none of these
    adapters: tuple[str, ...] = ()  # that a request may have: its model is then "MODEL:ADAPTER"


@dataclass(frozen=True)
class Load:
    """Load of the router and its workers (GetLoadResponse in protos/baton/v1/generation.proto)."""

    waiting_requests: int
    queued_requests: int
    queued_tokens: int
    running_requests: int
    max_running_requests: int
    page_size: int
    kv_tokens_used: int
    kv_tokens_total: int
    kv_utilization: float
    utilization: float
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True)
class DataRankStatus:
    """Load and capacity of one data rank of a pool."""

    queued_requests: int
    running_requests: int
    pages_free: int
    slots_free: int


@dataclass(frozen=True)
class WorkerStatus:
    """One pool, as the router sees its leader."""

    role: str
    address: str
    serving: bool
    reason: str
    incarnation: str
    stages: tuple[str, ...]
    queued_requests: int
    running_requests: int
    pages_total: int
    pages_free: int
    slots_total: int
    slots_free: int
    open_sessions: int
    busy_s: float = 0.0  # duration of the engine's current step so far
    prompt_tokens: int = 0  # computed since its start
    output_tokens: int = 0  # generated since its start
    tensor_size: int = 1  # tensor-parallel ranks (processes) of each stage
    data_ranks: tuple[DataRankStatus, ...] = ()  # data ranks of the pool, if there are several
    able_roles: tuple[str, ...] = ()  # roles that it can serve
    roles: tuple[str, ...] = ()  # roles that it serves now
    roles_epoch: int = 0  # number of the latest switch of its roles
    queued_tokens: int = 0  # prompt tokens to compute
    max_batch_requests: int = 0  # computed at a time
    prompt_tokens_per_s: float = 0.0  # while it has prompts, as the router measured; 0: not yet
    token_s: float = 0.0  # seconds between tokens of one of its responses, likewise


@dataclass(frozen=True)
class FlushedCache:
    """Flushed prefix cache of one worker: the number of evicted pages, or the error."""

    role: str
    address: str
    pages: int
    error: str = ""


@dataclass(frozen=True)
class PlacementCount:
    """Requests that a router placed in one way since its start (docs/roles.md)."""

    kind: str  # aggregated or disaggregated
    why: str
    requests: int


@dataclass(frozen=True)
class ClusterStatus:
    """State of a cluster as `baton status` shows it; waiting requests are queued in a router."""

    model: str
    waiting_requests: int
    running_requests: int
    workers: tuple[WorkerStatus, ...]
    waiting_tokens: int = 0  # prompt tokens of waiting requests
    admitted_requests: int = 0  # since the router's start
    placements: tuple[PlacementCount, ...] = ()
