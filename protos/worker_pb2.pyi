from protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetRolesRequest(_message.Message):
    __slots__ = ("epoch", "roles")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ...) -> None: ...

class SetRolesResponse(_message.Message):
    __slots__ = ("epoch", "roles")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_s", "role")
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    role: str
    def __init__(self, interval_s: _Optional[float] = ..., role: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("role", "incarnation", "model", "architecture", "revision", "compatibility", "compatibility_text", "vocab_size", "max_context_tokens", "num_layers", "page_size", "pages_total", "slots_total", "max_running_requests", "max_queued_requests", "stages", "tokenizer_digest", "max_batch_requests", "tensor_size", "data_size", "eos_token_ids", "wire_version", "roles", "adapters", "retired_adapters", "loaded_adapters", "lends_blocks")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_TEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LENDS_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    role: str
    incarnation: str
    model: str
    architecture: str
    revision: str
    compatibility: str
    compatibility_text: str
    vocab_size: int
    max_context_tokens: int
    num_layers: int
    page_size: int
    pages_total: int
    slots_total: int
    max_running_requests: int
    max_queued_requests: int
    stages: _containers.RepeatedScalarFieldContainer[str]
    tokenizer_digest: str
    max_batch_requests: int
    tensor_size: int
    data_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    wire_version: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    retired_adapters: _containers.RepeatedScalarFieldContainer[str]
    loaded_adapters: _containers.RepeatedScalarFieldContainer[str]
    lends_blocks: bool
    def __init__(self, role: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., revision: _Optional[str] = ..., compatibility: _Optional[str] = ..., compatibility_text: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., page_size: _Optional[int] = ..., pages_total: _Optional[int] = ..., slots_total: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., stages: _Optional[_Iterable[str]] = ..., tokenizer_digest: _Optional[str] = ..., max_batch_requests: _Optional[int] = ..., tensor_size: _Optional[int] = ..., data_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., wire_version: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[str]] = ..., retired_adapters: _Optional[_Iterable[str]] = ..., loaded_adapters: _Optional[_Iterable[str]] = ..., lends_blocks: _Optional[bool] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("serving", "reason", "queued_requests", "queued_tokens", "running_requests", "pages_free", "slots_free", "open_sessions", "busy_s", "prompt_tokens", "output_tokens", "start_s", "cache_reports", "data_ranks", "local_rest_tokens", "roles", "roles_epoch", "pull_cost", "copy_reports", "copy_cost")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_REPORTS_FIELD_NUMBER: _ClassVar[int]
    DATA_RANKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ROLES_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PULL_COST_FIELD_NUMBER: _ClassVar[int]
    COPY_REPORTS_FIELD_NUMBER: _ClassVar[int]
    COPY_COST_FIELD_NUMBER: _ClassVar[int]
    serving: bool
    reason: str
    queued_requests: int
    queued_tokens: int
    running_requests: int
    pages_free: int
    slots_free: int
    open_sessions: int
    busy_s: float
    prompt_tokens: int
    output_tokens: int
    start_s: float
    cache_reports: int
    data_ranks: _containers.RepeatedCompositeFieldContainer[_types_pb2.DataRankLoad]
    local_rest_tokens: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    roles_epoch: int
    pull_cost: float
    copy_reports: int
    copy_cost: float
    def __init__(self, serving: _Optional[bool] = ..., reason: _Optional[str] = ..., queued_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., pages_free: _Optional[int] = ..., slots_free: _Optional[int] = ..., open_sessions: _Optional[int] = ..., busy_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., start_s: _Optional[float] = ..., cache_reports: _Optional[int] = ..., data_ranks: _Optional[_Iterable[_Union[_types_pb2.DataRankLoad, _Mapping]]] = ..., local_rest_tokens: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., roles_epoch: _Optional[int] = ..., pull_cost: _Optional[float] = ..., copy_reports: _Optional[int] = ..., copy_cost: _Optional[float] = ...) -> None: ...

class CacheReport(_message.Message):
    __slots__ = ("number", "whole", "stored", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    whole: bool
    stored: bytes
    removed: bytes
    def __init__(self, number: _Optional[int] = ..., whole: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("info", "load", "cache", "copies")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    load: WorkerLoad
    cache: CacheReport
    copies: CacheReport
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., cache: _Optional[_Union[CacheReport, _Mapping]] = ..., copies: _Optional[_Union[CacheReport, _Mapping]] = ...) -> None: ...
