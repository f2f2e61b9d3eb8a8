"""Keys that are sent over gRPC only, and authenticators of messages over UCX and shared memory.

A key is 32 random bytes. Both ends derive from it a key for each direction of a pool, or for each
lane of a handoff, by keyed BLAKE2b. One derived key reveals nothing about another.

An authenticator is GMAC: AES-256-GCM that encrypts at most a label, with the message as additional
data. Its number must not be used twice with one key, unless for the same message. It is the fastest
one in a maintained library (docs/measurements.md lists the others).
"""

import hashlib
import hmac
import secrets
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
SEAL_BYTES = 16
_NONCE_BYTES = 12
_LENGTH = struct.Struct("<Q")

AnyBytes = bytes | bytearray | memoryview


def new_key() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(KEY_BYTES)


def derived(key: bytes, purpose: str, *context: bytes, num_bytes: int = KEY_BYTES) -> bytes:
    """Return at most 64 bytes that only holders of `key` can derive.

    Each `purpose` (at most 16 ASCII characters) and each sequence of `context` yields different
    bytes.
    """
    hashed = hashlib.blake2b(key=key, digest_size=num_bytes, person=purpose.encode())
    for part in context:
        hashed.update(_LENGTH.pack(len(part)) + part)
    return hashed.digest()


class Authenticator:
    """GMAC with one key."""

    def __init__(self, key: bytes) -> None:
        self._encrypt = AESGCM(key).encrypt

    def seal(self, number: int, message: AnyBytes, label: bytes = b"") -> bytes:
        """Return the authenticator of message and label, 16 bytes."""
        sealed = self._encrypt(number.to_bytes(_NONCE_BYTES, "little"), label, message)
        return sealed[-SEAL_BYTES:] if label else sealed

    def accepts(
        self, seal: bytes | memoryview, number: int, message: AnyBytes, label: bytes = b""
    ) -> bool:
        """Return whether `seal` is the authenticator of message and label, in constant time."""
        return hmac.compare_digest(seal, self.seal(number, message, label))
