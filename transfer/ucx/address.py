"""UCX worker addresses with a checksum: UCX does not check the bytes of an address."""

import xxhash

from runtime.errors import PeerLostError

_DIGEST_BYTES = 8


def frame_address(raw: bytes) -> bytes:
    """The address as it travels."""
    return xxhash.xxh3_64_digest(raw) + raw


def unframe_address(address: bytes) -> bytes:
    """The address as UCX takes it. Raises PeerLostError when it was not made by `frame_address`."""
    digest, raw = address[:_DIGEST_BYTES], address[_DIGEST_BYTES:]
    if not raw or xxhash.xxh3_64_digest(raw) != digest:
        raise PeerLostError(f"{len(address)} bytes that are not the address of a UCX worker")
    return raw
