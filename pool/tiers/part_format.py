"""The bytes of an object in a tier.

An object holds one rank's part of one page (`Content.PAGE`), or of the recurrent state after it
(`Content.STATE`). It is in the safetensors format, with one tensor for each layer and kind of cache
in the order of both, and a last one with a random salt and their authenticators. The rest follows
from the block's name, the model's caches and the part. So a reader knows all bytes in front of the
tensors, and interprets none of them: an object that differs there is not used.

The authenticators detect damage, and objects in the place of others. They detect forgery only if
the key from which theirs are derived is secret. The salt gives each object a key of its own.
"""

import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from engine.memory.layout import CacheSpec, travelling
from pool.tiers.block_store import Content, StagePart
from runtime.digests import NAME_BYTES
from transfer.transport.authenticator import KEY_BYTES, SEAL_BYTES, Authenticator, derived

FORMAT = "baton cache 2"
SEALS = "seals"
PUBLIC_KEY = bytes(KEY_BYTES)  # known to everyone, so that it detects damage only
_NO_NAME = bytes(NAME_BYTES).hex().encode()
_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class PartLayout:
    """The layout of all objects with the same content of the same part.

    `specs` covers the whole model.
    """

    specs: tuple[CacheSpec, ...]
    content: Content
    part: StagePart

    @cached_property
    def of_part(self) -> tuple[CacheSpec, ...]:
        """Return the part's own specs, in the order of the object."""
        return tuple(spec.of_rank(self.part.tensor) for spec in self.of_whole)

    @cached_property
    def of_whole(self) -> tuple[CacheSpec, ...]:
        """Return the specs of the same caches for the whole model, in the same order."""
        return tuple(
            spec
            for spec in sorted(travelling(self.specs), key=lambda each: (each.layer_id, each.kind))
            if spec.layer_id in self.part.layers
            and self.content.has(spec.kind)
            and not (spec.of_draft and self.part.tensor.rank)
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the first byte of each tensor after the header, and that of the authenticators."""
        return tuple(accumulate((spec.record_bytes for spec in self.of_part), initial=0))

    def header(self, block: bytes) -> bytes:
        """Return the bytes of a block's object in front of the tensors."""
        return self._header_of_none.replace(_NO_NAME, block.hex().encode(), 1)

    @cached_property
    def _header_of_none(self) -> bytes:
        tensors: dict[str, object] = {
            "__metadata__": {
                "format": FORMAT,
                "content": str(self.content),
                "block": _NO_NAME.decode(),
                "part": str(self.part),
            }
        }
        for spec, start in zip(self.of_part, self.starts, strict=False):
            tensors[_label(spec)] = {
                "dtype": _DTYPES[spec.dtype],
                "shape": spec.record_shape,
                "data_offsets": (start, start + spec.record_bytes),
            }
        end = self.starts[-1]
        tensors[SEALS] = {
            "dtype": "U8",
            "shape": (len(self.of_part) + 1, SEAL_BYTES),
            "data_offsets": (end, end + self.num_seal_bytes),
        }
        text = json.dumps(tensors, separators=(",", ":")).encode()
        text = text.ljust(-(-len(text) // _LENGTH_BYTES) * _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @property
    def num_seal_bytes(self) -> int:
        """Return the bytes of the salt and the authenticators."""
        return (len(self.of_part) + 1) * SEAL_BYTES

    def sealed(self, block: bytes, records: Sequence[memoryview], key: bytes) -> list[memoryview]:
        """Return the pieces of a block's object with these tensors' bytes, which are not copied."""
        salt = secrets.token_bytes(SEAL_BYTES)
        seals = salt + self._seals(block, records, key, salt)
        return [memoryview(self.header(block)), *records, memoryview(seals)]

    def blank(self, records: Sequence[memoryview]) -> list[memoryview]:
        """Return pieces for an object to be read, with its tensors in `records`."""
        header = bytearray(len(self._header_of_none))
        return [memoryview(header), *records, memoryview(bytearray(self.num_seal_bytes))]

    def is_intact(self, block: bytes, pieces: Sequence[memoryview], key: bytes) -> bool:
        """Return whether the pieces are an object of this block that was sealed with `key`."""
        header, *records, found = pieces
        salt, seals = bytes(found[:SEAL_BYTES]), bytes(found[SEAL_BYTES:])
        return header == self.header(block) and hmac.compare_digest(
            seals, self._seals(block, records, key, salt)
        )

    def _seals(self, block: bytes, records: Sequence[memoryview], key: bytes, salt: bytes) -> bytes:
        """Return the authenticators of the tensors, in the order of the object."""
        own = derived(
            key,
            "baton tier",
            salt,
            block,
            str(self.content).encode(),
            str(self.part).encode(),
        )
        authenticator = Authenticator(own)
        return b"".join(
            authenticator.seal(number, record, _label(spec).encode())
            for number, (spec, record) in enumerate(zip(self.of_part, records, strict=True))
        )


def _label(spec: CacheSpec) -> str:
    return f"layers.{spec.layer_id}.{spec.kind}"
