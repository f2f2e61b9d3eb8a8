from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageEndpoint(_message.Message):
    __slots__ = ("first_layer", "end_layer", "address", "incarnation", "tensor_rank", "tensor_size")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SIZE_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    end_layer: int
    address: bytes
    incarnation: str
    tensor_rank: int
    tensor_size: int
    def __init__(self, first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., address: _Optional[bytes] = ..., incarnation: _Optional[str] = ..., tensor_rank: _Optional[int] = ..., tensor_size: _Optional[int] = ...) -> None: ...

class SourceTerms(_message.Message):
    __slots__ = ("compatibility", "compatibility_text", "page_size", "num_tokens", "chunk_tokens", "page_ids", "slot_id", "stages", "sends_rest", "request_key", "is_loan", "content")
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_TEXT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    SENDS_REST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_LOAN_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    compatibility: str
    compatibility_text: str
    page_size: int
    num_tokens: int
    chunk_tokens: int
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    slot_id: int
    stages: _containers.RepeatedCompositeFieldContainer[StageEndpoint]
    sends_rest: bool
    request_key: int
    is_loan: bool
    content: bytes
    def __init__(self, compatibility: _Optional[str] = ..., compatibility_text: _Optional[str] = ..., page_size: _Optional[int] = ..., num_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., page_ids: _Optional[_Iterable[int]] = ..., slot_id: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageEndpoint, _Mapping]]] = ..., sends_rest: _Optional[bool] = ..., request_key: _Optional[int] = ..., is_loan: _Optional[bool] = ..., content: _Optional[bytes] = ...) -> None: ...

class DestinationTerms(_message.Message):
    __slots__ = ("session_id", "epoch", "tag_base", "page_ids", "slot_id", "stages", "plan_digest", "with_draft", "key", "held_tokens", "in_place")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TAG_BASE_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WITH_DRAFT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    tag_base: int
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    slot_id: int
    stages: _containers.RepeatedCompositeFieldContainer[StageEndpoint]
    plan_digest: str
    with_draft: bool
    key: bytes
    held_tokens: int
    in_place: bool
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tag_base: _Optional[int] = ..., page_ids: _Optional[_Iterable[int]] = ..., slot_id: _Optional[int] = ..., stages: _Optional[_Iterable[_Union[StageEndpoint, _Mapping]]] = ..., plan_digest: _Optional[str] = ..., with_draft: _Optional[bool] = ..., key: _Optional[bytes] = ..., held_tokens: _Optional[int] = ..., in_place: _Optional[bool] = ...) -> None: ...
