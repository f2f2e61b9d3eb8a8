"""UCX worker addresses with a checksum, because UCX does not verify the bytes of an address."""

import xxhash

_DIGEST_BYTES = 8


def frame_address(raw: bytes) -> bytes:
    """Return the address in the form in which it is sent."""
    return xxhash.xxh3_64_digest(raw) + raw


def unframe_address(address: bytes) -> bytes:
    """Return the address for UCX. Raises ValueError if `frame_address` did not make it."""
    digest = address[:_DIGEST_BYTES]
    raw = address[_DIGEST_BYTES:]
    if not raw or xxhash.xxh3_64_digest(raw) != digest:
        raise ValueError(f"{len(address)} bytes are not the address of a UCX worker")
    return raw
