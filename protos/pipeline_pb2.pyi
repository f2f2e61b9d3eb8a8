from protos import transfer_pb2 as _transfer_pb2
from protos import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageSessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_SESSION_STATE_UNSPECIFIED: _ClassVar[StageSessionState]
    STAGE_SESSION_STATE_OPEN: _ClassVar[StageSessionState]
    STAGE_SESSION_STATE_COMPLETE: _ClassVar[StageSessionState]
    STAGE_SESSION_STATE_FAILED: _ClassVar[StageSessionState]
    STAGE_SESSION_STATE_DRAINED: _ClassVar[StageSessionState]
STAGE_SESSION_STATE_UNSPECIFIED: StageSessionState
STAGE_SESSION_STATE_OPEN: StageSessionState
STAGE_SESSION_STATE_COMPLETE: StageSessionState
STAGE_SESSION_STATE_FAILED: StageSessionState
STAGE_SESSION_STATE_DRAINED: StageSessionState

class StageHello(_message.Message):
    __slots__ = ("rank", "endpoint", "channel_address", "settings", "weights", "pool_epoch")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    POOL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    endpoint: _transfer_pb2.StageEndpoint
    channel_address: bytes
    settings: _containers.ScalarMap[str, str]
    weights: StageWeights
    pool_epoch: int
    def __init__(self, rank: _Optional[int] = ..., endpoint: _Optional[_Union[_transfer_pb2.StageEndpoint, _Mapping]] = ..., channel_address: _Optional[bytes] = ..., settings: _Optional[_Mapping[str, str]] = ..., weights: _Optional[_Union[StageWeights, _Mapping]] = ..., pool_epoch: _Optional[int] = ...) -> None: ...

class StageWeights(_message.Message):
    __slots__ = ("total", "copies", "draft_total")
    class CopiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOTAL_FIELD_NUMBER: _ClassVar[int]
    total: str
    copies: _containers.ScalarMap[str, str]
    draft_total: str
    def __init__(self, total: _Optional[str] = ..., copies: _Optional[_Mapping[str, str]] = ..., draft_total: _Optional[str] = ...) -> None: ...

class StageSession(_message.Message):
    __slots__ = ("session_id", "epoch", "state", "error_reason", "error_text", "num_bytes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    state: StageSessionState
    error_reason: str
    error_text: str
    num_bytes: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[StageSessionState, str]] = ..., error_reason: _Optional[str] = ..., error_text: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class GrammarChecked(_message.Message):
    __slots__ = ("check_id", "problem", "refused")
    CHECK_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    check_id: int
    problem: str
    refused: bool
    def __init__(self, check_id: _Optional[int] = ..., problem: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...

class AdaptersHeld(_message.Message):
    __slots__ = ("number", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    problem: str
    def __init__(self, number: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class BlocksMoved(_message.Message):
    __slots__ = ("number", "num_blocks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    num_blocks: int
    def __init__(self, number: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("hello", "session", "leaving", "grammar_checked", "ready", "adapters_held", "blocks_moved")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_CHECKED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    hello: StageHello
    session: StageSession
    leaving: Leaving
    grammar_checked: GrammarChecked
    ready: StageReady
    adapters_held: AdaptersHeld
    blocks_moved: BlocksMoved
    def __init__(self, hello: _Optional[_Union[StageHello, _Mapping]] = ..., session: _Optional[_Union[StageSession, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., grammar_checked: _Optional[_Union[GrammarChecked, _Mapping]] = ..., ready: _Optional[_Union[StageReady, _Mapping]] = ..., adapters_held: _Optional[_Union[AdaptersHeld, _Mapping]] = ..., blocks_moved: _Optional[_Union[BlocksMoved, _Mapping]] = ...) -> None: ...

class PoolFormed(_message.Message):
    __slots__ = ("pool_epoch", "channel_addresses", "key", "session", "members")
    POOL_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    pool_epoch: int
    channel_addresses: _containers.RepeatedScalarFieldContainer[bytes]
    key: bytes
    session: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pool_epoch: _Optional[int] = ..., channel_addresses: _Optional[_Iterable[bytes]] = ..., key: _Optional[bytes] = ..., session: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session_id", "source", "destination", "request_key", "is_cached")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_CACHED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    source: _transfer_pb2.SourceTerms
    destination: _transfer_pb2.DestinationTerms
    request_key: int
    is_cached: bool
    def __init__(self, session_id: _Optional[str] = ..., source: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ..., destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ..., request_key: _Optional[int] = ..., is_cached: _Optional[bool] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ("session_id", "request_key")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_key: int
    def __init__(self, session_id: _Optional[str] = ..., request_key: _Optional[int] = ...) -> None: ...

class CheckGrammar(_message.Message):
    __slots__ = ("check_id", "grammar")
    CHECK_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    check_id: int
    grammar: _types_pb2.StructuredOutput
    def __init__(self, check_id: _Optional[int] = ..., grammar: _Optional[_Union[_types_pb2.StructuredOutput, _Mapping]] = ...) -> None: ...

class HoldAdapters(_message.Message):
    __slots__ = ("number", "keys")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    number: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveBlocks(_message.Message):
    __slots__ = ("number", "load", "names", "page_ids", "slot_id", "state_of", "tier")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_OF_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    number: int
    load: bool
    names: _containers.RepeatedScalarFieldContainer[bytes]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    slot_id: int
    state_of: bytes
    tier: str
    def __init__(self, number: _Optional[int] = ..., load: _Optional[bool] = ..., names: _Optional[_Iterable[bytes]] = ..., page_ids: _Optional[_Iterable[int]] = ..., slot_id: _Optional[int] = ..., state_of: _Optional[bytes] = ..., tier: _Optional[str] = ...) -> None: ...

class FindBlocks(_message.Message):
    __slots__ = ("number", "tier", "names", "with_state")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    WITH_STATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    tier: str
    names: _containers.RepeatedScalarFieldContainer[bytes]
    with_state: bool
    def __init__(self, number: _Optional[int] = ..., tier: _Optional[str] = ..., names: _Optional[_Iterable[bytes]] = ..., with_state: _Optional[bool] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("formed", "open_session", "close_session", "check_grammar", "hold_adapters", "move_blocks", "find_blocks")
    FORMED_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSION_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SESSION_FIELD_NUMBER: _ClassVar[int]
    CHECK_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    HOLD_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MOVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    formed: PoolFormed
    open_session: OpenSession
    close_session: CloseSession
    check_grammar: CheckGrammar
    hold_adapters: HoldAdapters
    move_blocks: MoveBlocks
    find_blocks: FindBlocks
    def __init__(self, formed: _Optional[_Union[PoolFormed, _Mapping]] = ..., open_session: _Optional[_Union[OpenSession, _Mapping]] = ..., close_session: _Optional[_Union[CloseSession, _Mapping]] = ..., check_grammar: _Optional[_Union[CheckGrammar, _Mapping]] = ..., hold_adapters: _Optional[_Union[HoldAdapters, _Mapping]] = ..., move_blocks: _Optional[_Union[MoveBlocks, _Mapping]] = ..., find_blocks: _Optional[_Union[FindBlocks, _Mapping]] = ...) -> None: ...
