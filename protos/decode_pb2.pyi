from protos import transfer_pb2 as _transfer_pb2
from protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeInputs(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[DecodeInput]
    def __init__(self, inputs: _Optional[_Iterable[_Union[DecodeInput, _Mapping]]] = ...) -> None: ...

class DecodeInput(_message.Message):
    __slots__ = ("key", "open", "new_source", "first_token", "source_lost", "cancelled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEW_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LOST_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    key: int
    open: DecodeOpen
    new_source: _transfer_pb2.SourceTerms
    first_token: _types_pb2.TokenChunk
    source_lost: DecodeSourceLost
    cancelled: _types_pb2.RequestCancelled
    def __init__(self, key: _Optional[int] = ..., open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., new_source: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., first_token: _Optional[_Union[_types_pb2.TokenChunk, _Mapping]] = ..., source_lost: _Optional[_Union[DecodeSourceLost, _Mapping]] = ..., cancelled: _Optional[_Union[_types_pb2.RequestCancelled, _Mapping]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("request", "source", "replayed_token_ids", "context", "holder")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.EngineRequest
    source: _transfer_pb2.SourceTerms
    replayed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    context: _types_pb2.RequestContext
    holder: _types_pb2.BlockHolder
    def __init__(self, request: _Optional[_Union[_types_pb2.EngineRequest, _Mapping]] = ..., source: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., replayed_token_ids: _Optional[_Iterable[int]] = ..., context: _Optional[_Union[_types_pb2.RequestContext, _Mapping]] = ..., holder: _Optional[_Union[_types_pb2.BlockHolder, _Mapping]] = ...) -> None: ...

class DecodeSourceLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeCommitted(_message.Message):
    __slots__ = ("transfer_exposed_s", "num_bytes")
    TRANSFER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer_exposed_s: float
    num_bytes: int
    def __init__(self, transfer_exposed_s: _Optional[float] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class DecodeLocal(_message.Message):
    __slots__ = ("cached_tokens", "pulled_tokens", "disk_tokens", "host_tokens", "server_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    pulled_tokens: int
    disk_tokens: int
    host_tokens: int
    server_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., pulled_tokens: _Optional[int] = ..., disk_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., server_tokens: _Optional[int] = ...) -> None: ...

class DecodeFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "queue_s", "decode_s", "num_preemptions")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: _types_pb2.FinishReason
    stop_token_id: int
    queue_s: float
    decode_s: float
    num_preemptions: int
    def __init__(self, reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("key", "position", "destination", "committed", "local", "tokens", "finished", "ended")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    key: int
    position: int
    destination: _transfer_pb2.DestinationTerms
    committed: DecodeCommitted
    local: DecodeLocal
    tokens: _types_pb2.TokenChunk
    finished: DecodeFinished
    ended: _types_pb2.RequestEnded
    def __init__(self, key: _Optional[int] = ..., position: _Optional[int] = ..., destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ..., committed: _Optional[_Union[DecodeCommitted, _Mapping]] = ..., local: _Optional[_Union[DecodeLocal, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ..., ended: _Optional[_Union[_types_pb2.RequestEnded, _Mapping]] = ...) -> None: ...
