from protos import transfer_pb2 as _transfer_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LendRequest(_message.Message):
    __slots__ = ("blocks", "destination")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    blocks: BlockNames
    destination: _transfer_pb2.DestinationTerms
    def __init__(self, blocks: _Optional[_Union[BlockNames, _Mapping]] = ..., destination: _Optional[_Union[_transfer_pb2.DestinationTerms, _Mapping]] = ...) -> None: ...

class BlockNames(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: bytes
    def __init__(self, names: _Optional[bytes] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("offered", "sent")
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    offered: LoanOffered
    sent: LoanSent
    def __init__(self, offered: _Optional[_Union[LoanOffered, _Mapping]] = ..., sent: _Optional[_Union[LoanSent, _Mapping]] = ...) -> None: ...

class LoanOffered(_message.Message):
    __slots__ = ("terms",)
    TERMS_FIELD_NUMBER: _ClassVar[int]
    terms: _transfer_pb2.SourceTerms
    def __init__(self, terms: _Optional[_Union[_transfer_pb2.SourceTerms, _Mapping]] = ...) -> None: ...

class LoanSent(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...
