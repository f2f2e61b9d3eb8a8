"""What a client sends and receives, as plain values. Generated protobuf types stay behind
`baton.wire`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant's message asks for. `arguments` is a JSON object, as text."""

    name: str
    arguments: str = "{}"
    id: str = ""


@dataclass(frozen=True)
class ChatMessage:
    """`role` as in the model's chat template: user, assistant, system, tool. The content is a text,
    a tuple of the texts that OpenAI's API has in parts, or None beside calls. `tool_call_id`: of
    the call that a tool answers."""

    role: str
    content: str | tuple[str, ...] | None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. None leaves the server's default; 0 means 0. Ranges:
    protos/baton/v1/types.proto."""

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
    """When generation ends, besides the model's own end-of-sequence tokens and its context
    limit."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None


@dataclass(frozen=True)
class StructuredOutput:
    """What the whole output must look like: exactly one of a JSON schema (as JSON text) and a
    regular expression."""

    json_schema: str | None = None
    regex: str | None = None


# Text, token ids, or the messages of a chat.
Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Query:
    """One request. An empty `request_id` lets the server choose, an empty `model` takes the one
    that is served. `speculate=False` declines drafts, `prefix_cache=False` what earlier prompts
    left; both change its speed and nothing else. Requests share what they leave with those of the
    same `cache_salt` alone. `resumed` goes on with an answer of which these tokens are here
    already, per choice (protos/baton/v1/generation.proto); a client does so for what it began. For
    chats: `tools` the model may call, in the form of OpenAI's API; `template_arguments` that its
    chat template takes; `continue_final_message` goes on with the last message. Calls and reasoning
    come as the text that the model writes."""

    prompt: Prompt
    sampling: Sampling = Sampling()
    stop: Stop = Stop()
    request_id: str = ""
    model: str = ""
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    n: int | None = (
        None  # choices; each has a seed of its own, see protos/baton/v1/generation.proto
    )
    priority: int = 0
    skip_text: bool = False
    speculate: bool | None = None
    prefix_cache: bool | None = None
    cache_salt: str = ""
    resumed: tuple[tuple[int, ...], ...] = ()
    resumed_from: tuple[str, ...] = ()  # `Chunk.compatibility` of each choice that is resumed
    tools: tuple[Mapping[str, object], ...] = ()
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    continue_final_message: bool = False


class FinishReason(StrEnum):
    """Why an answer ended: with a stop token or text, at a limit of tokens, or by whoever aborted
    it."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Usage:
    """`cached_tokens` of the prompt's were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms; `top` is (token id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptLogprobs:
    """What the model made of prompt tokens, from `first_position` on; the first token of a prompt
    has none."""

    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Timings:
    """Seconds per part of the request's life; None where the part did not happen."""

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
    """Tokens drawn in one step. `text` may lag behind: whole characters only, never part of a stop
    string."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    index: int = 0  # of the choice
    compatibility: str = ""  # in the first chunk with tokens: of the workers that draw them


@dataclass(frozen=True)
class Finish:
    """The last event of a choice; `stop_string` or `stop_token_id` is what ended it, if one of them
    did."""

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
    """A whole answer. `prompt_logprobs` are those of positions 1 and up, if they were requested and
    it is choice 0."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish: Finish
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What is served, and within which limits."""

    model: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
    revision: str
    default_sampling: Sampling = Sampling()  # what a request is drawn with that sets none of these


@dataclass(frozen=True)
class Load:
    """How busy the router and its workers are; see GetLoadResponse in
    protos/baton/v1/generation.proto."""

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
    """What one data rank of a pool has to do, and room for."""

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
    busy_s: float = 0.0  # how long its engine has been within its present step
    prompt_tokens: int = 0  # computed since its start
    output_tokens: int = 0  # drawn since its start
    tensor_size: int = 1  # ranks (processes) that share each stage
    data_ranks: tuple[
        DataRankStatus, ...
    ] = ()  # groups of these with requests of their own, where there are several


@dataclass(frozen=True)
class FlushedCache:
    """One worker's prefix cache: how many pages it gave up, or why it did not."""

    role: str
    address: str
    pages: int
    error: str = ""


@dataclass(frozen=True)
class ClusterStatus:
    """What `baton status` shows. Waiting requests are those a router holds back."""

    model: str
    waiting_requests: int
    running_requests: int
    workers: tuple[WorkerStatus, ...]
