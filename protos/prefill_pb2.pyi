from protos import transfer_pb2 as _transfer_pb2
from protos import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunRequest(_message.Message):
    __slots__ = ("request", "destination")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    request: _types_pb2.EngineRequest
    destination: _transfer_pb2.DestinationTerms
    def __init__(self, request: _Optional[_Union[_types_pb2.EngineRequest, _Mapping]] = ..., destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("terms", "queue_s", "cached_tokens")
    TERMS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    terms: _transfer_pb2.SourceTerms
    queue_s: float
    cached_tokens: int
    def __init__(self, terms: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., queue_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

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

class RunResponse(_message.Message):
    __slots__ = ("started", "first_token", "sent", "scored")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    started: PrefillStarted
    first_token: PrefillFirstToken
    sent: PrefillSent
    scored: _types_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., sent: _Optional[_Union[PrefillSent, _Mapping]] = ..., scored: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...
