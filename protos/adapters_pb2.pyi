from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAdapters]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAdapters, _Mapping]]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAdapters]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAdapters, _Mapping]]] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerAdapters]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerAdapters, _Mapping]]] = ...) -> None: ...

class WorkerAdapters(_message.Message):
    __slots__ = ("role", "address", "adapters", "error", "max_bytes")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    error: str
    max_bytes: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ..., error: _Optional[str] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("name", "digest", "num_bytes", "loaded", "retired", "requests", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    num_bytes: int
    loaded: bool
    retired: bool
    requests: int
    problem: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., loaded: _Optional[bool] = ..., retired: _Optional[bool] = ..., requests: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
