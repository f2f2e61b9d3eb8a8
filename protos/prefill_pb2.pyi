from protos import transfer_pb2 as _transfer_pb2
from protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillInputs(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[PrefillInput]
    def __init__(self, inputs: _Optional[_Iterable[_Union[PrefillInput, _Mapping]]] = ...) -> None: ...

class PrefillInput(_message.Message):
    __slots__ = ("key", "open", "destination", "release", "scores_read", "cancelled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SCORES_READ_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    key: int
    open: PrefillOpen
    destination: _transfer_pb2.DestinationTerms
    release: PrefillRelease
    scores_read: PrefillScoresRead
    cancelled: _types_pb2.RequestCancelled
    def __init__(self, key: _Optional[int] = ..., open: _Optional[_Union[PrefillOpen, _Mapping]] = ..., destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ..., release: _Optional[_Union[PrefillRelease, _Mapping]] = ..., scores_read: _Optional[_Union[PrefillScoresRead, _Mapping]] = ..., cancelled: _Optional[_Union[_types_pb2.RequestCancelled, _Mapping]] = ...) -> None: ...

class PrefillOpen(_message.Message):
    __slots__ = ("request", "context", "holder")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.EngineRequest
    context: _types_pb2.RequestContext
    holder: _types_pb2.BlockHolder
    def __init__(self, request: _Optional[_Union[_types_pb2.EngineRequest, _Mapping]] = ..., context: _Optional[_Union[_types_pb2.RequestContext, _Mapping]] = ..., holder: _Optional[_Union[_types_pb2.BlockHolder, _Mapping]] = ...) -> None: ...

class PrefillRelease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillScoresRead(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("terms", "queue_s", "cached_tokens", "pulled_tokens", "disk_tokens", "host_tokens", "server_tokens")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    terms: _transfer_pb2.SourceTerms
    queue_s: float
    cached_tokens: int
    pulled_tokens: int
    disk_tokens: int
    host_tokens: int
    server_tokens: int
    def __init__(self, terms: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., queue_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., pulled_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., server_tokens: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("token", "prefill_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    token: _types_pb2.TokenChunk
    prefill_s: float
    def __init__(self, token: _Optional[_Union[_types_pb2.TokenChunk, _Mapping]] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class PrefillSent(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class PrefillEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("key", "started", "first_token", "sent", "scored", "ended")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    key: int
    started: PrefillStarted
    first_token: PrefillFirstToken
    sent: PrefillSent
    scored: _types_pb2.PromptLogprobs
    ended: _types_pb2.RequestEnded
    def __init__(self, key: _Optional[int] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., sent: _Optional[_Union[PrefillSent, _Mapping]] = ..., scored: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., ended: _Optional[_Union[_types_pb2.RequestEnded, _Mapping]] = ...) -> None: ...
