from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListCachesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerCache]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerCache, _Mapping]]] = ...) -> None: ...

class WorkerCache(_message.Message):
    __slots__ = ("role", "address", "error", "page_tokens", "pages_total", "pages", "points", "snapshots", "idle_pages", "queried_tokens", "matched_tokens", "tiers", "sessions", "retained_pages")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RETAINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    error: str
    page_tokens: int
    pages_total: int
    pages: int
    points: int
    snapshots: int
    idle_pages: _containers.RepeatedCompositeFieldContainer[IdlePages]
    queried_tokens: int
    matched_tokens: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierUse]
    sessions: int
    retained_pages: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., error: _Optional[str] = ..., page_tokens: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages: _Optional[int] = ..., points: _Optional[int] = ..., snapshots: _Optional[int] = ..., idle_pages: _Optional[_Iterable[_Union[IdlePages, _Mapping]]] = ..., queried_tokens: _Optional[int] = ..., matched_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierUse, _Mapping]]] = ..., sessions: _Optional[int] = ..., retained_pages: _Optional[int] = ...) -> None: ...

class IdlePages(_message.Message):
    __slots__ = ("at_most_s", "pages")
    AT_MOST_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    at_most_s: float
    pages: int
    def __init__(self, at_most_s: _Optional[float] = ..., pages: _Optional[int] = ...) -> None: ...

class TierUse(_message.Message):
    __slots__ = ("tier", "used_bytes", "max_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    used_bytes: int
    max_bytes: int
    def __init__(self, tier: _Optional[str] = ..., used_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...
