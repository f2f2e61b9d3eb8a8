"""HTTP/2 by hand, for what no client library sends."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PART_BYTES = 16_000  # of a frame, whose limit is 16,384 unless the peer says otherwise

Fields = Iterable[tuple[bytes, bytes]]


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Encode one frame."""
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def block(path: bytes, fields: Fields = ()) -> bytes:
    """Encode the header block of a gRPC call to `path`, in HPACK literals that are not indexed."""
    required = (
        (b":path", path),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
    return b"\x83\x86" + b"".join(_literal(name, value) for name, value in (*required, *fields))


def call(
    path: bytes, fields: Fields = (), message: bytes = b"", *, stream: int = 1, compressed: int = 0
) -> bytes:
    """Encode a whole call of one message; `compressed` is gRPC's flag."""
    content = bytes([compressed]) + len(message).to_bytes(4, "big") + message
    parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
    frames = [frame(DATA, part, END_STREAM * (part is parts[-1]), stream) for part in parts]
    return frame(HEADERS, block(path, fields), END_HEADERS, stream) + b"".join(frames)


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    low = len(text) - 127
    return bytes([127, *([] if low < 128 else [low & 127 | 128]), low >> 7 if low >= 128 else low])


class RawConnection:
    """A client's end; what the server sends is read only by `ended` and `closed`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, content: bytes) -> None:
        """Send; raise ConnectionError once the server has closed the connection."""
        self._writer.write(content)
        await self._writer.drain()

    async def ended(self) -> int:
        """Read frames until one ends a stream, and return the stream. Raises IncompleteReadError at
        the end."""
        while True:
            head = await self._reader.readexactly(9)
            await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            stream = int.from_bytes(head[5:], "big")
            if head[3] == RST_STREAM or (head[3] in (DATA, HEADERS) and head[4] & END_STREAM):
                return stream

    async def closed(self) -> None:
        """Read until the server closes the connection."""
        try:
            while await self._reader.read(65536):
                pass
        except ConnectionError:
            pass


@asynccontextmanager
async def raw_connection(
    address: str, *, greets: bool = True, source: str | None = None
) -> AsyncIterator[RawConnection]:
    """Connect to HOST:PORT, from the address `source`; with `greets` the preface and empty settings
    are sent."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), local_addr=None if source is None else (source, 0)
    )
    connection = RawConnection(reader, writer)
    try:
        if greets:
            await connection.send(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACK))
        yield connection
    finally:
        writer.close()
