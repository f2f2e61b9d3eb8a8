from protos import transfer_pb2 as _transfer_pb2
from protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeOpen(_message.Message):
    __slots__ = ("request", "source", "replayed_token_ids", "steps_id", "steps_key")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_KEY_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.EngineRequest
    source: _transfer_pb2.SourceTerms
    replayed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    steps_id: str
    steps_key: int
    def __init__(self, request: _Optional[_Union[_types_pb2.EngineRequest, _Mapping]] = ..., source: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., replayed_token_ids: _Optional[_Iterable[int]] = ..., steps_id: _Optional[str] = ..., steps_key: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("open", "new_source", "first_token", "source_lost")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEW_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LOST_FIELD_NUMBER: _ClassVar[int]
    open: DecodeOpen
    new_source: _transfer_pb2.SourceTerms
    first_token: _types_pb2.TokenChunk
    source_lost: DecodeSourceLost
    def __init__(self, open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., new_source: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., first_token: _Optional[_Union[_types_pb2.TokenChunk, _Mapping]] = ..., source_lost: _Optional[_Union[DecodeSourceLost, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

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

class DecodeResponse(_message.Message):
    __slots__ = ("destination",)
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    destination: _transfer_pb2.DestinationTerms
    def __init__(self, destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("steps_id",)
    STEPS_ID_FIELD_NUMBER: _ClassVar[int]
    steps_id: str
    def __init__(self, steps_id: _Optional[str] = ...) -> None: ...

class StepsResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StepEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[StepEvent, _Mapping]]] = ...) -> None: ...

class StepEvent(_message.Message):
    __slots__ = ("steps_key", "position", "committed", "local", "tokens", "finished")
    STEPS_KEY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    steps_key: int
    position: int
    committed: DecodeCommitted
    local: DecodeLocal
    tokens: _types_pb2.TokenChunk
    finished: DecodeFinished
    def __init__(self, steps_key: _Optional[int] = ..., position: _Optional[int] = ..., committed: _Optional[_Union[DecodeCommitted, _Mapping]] = ..., local: _Optional[_Union[DecodeLocal, _Mapping]] = ..., tokens: _Optional[_Union[_types_pb2.TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[DecodeFinished, _Mapping]] = ...) -> None: ...
