"""A digest over every byte of a model's weights, made while they are read, stage by stage.

Each tensor, or each entry of a stack that is read entry by entry, has a digest of its own: name,
type and shape as the file gives them, and its bytes. A set of tensors has the sum of theirs modulo
2^128, so that it depends neither on the order of reading nor on which stage read what: the sums of
a pool's stages add up to the same number however its layers are split. A sum is no defence against
a forger, who could replace the files on all hosts as well; it finds files that differ, which is
what happens.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runtime.errors import IncompatiblePeerError

_BYTES = 16


@dataclass(frozen=True)
class StageWeights:
    """What one stage has read: the sum over the tensors that are counted here (hex), the digests
    (hex) of copies of tensors that another stage counts, by name, and the sum over its draft's own
    tensors; empty without a draft."""

    total: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    draft_total: str = ""


@dataclass(frozen=True)
class PoolWeights:
    """What all stages of a pool have read together (hex)."""

    total: str
    draft_total: str = ""

    @classmethod
    def of(cls, stages: Iterable[StageWeights]) -> "PoolWeights":
        found = list(stages)
        drafts = [stage.draft_total for stage in found if stage.draft_total]
        return cls(
            _spelled(sum(int(stage.total, 16) for stage in found if stage.total)),
            drafts[-1] if drafts else "",
        )

    def revision(self, description: str) -> str:
        """Of the model, given the digest of its config and its tensors' names. Hex."""
        return hashlib.blake2b(
            f"{description} {self.total}".encode(), digest_size=_BYTES
        ).hexdigest()

    def draft_revision(self, description: str) -> str:
        """The same of the draft."""
        return hashlib.blake2b(
            f"{description} {self.draft_total}".encode(), digest_size=_BYTES
        ).hexdigest()


class WeightsDigest:
    """Of the tensors one process reads. A tensor that is read twice counts once."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}

    def add(self, name: str, kind: str, hashed: bytes, *, item: int | None = None) -> None:
        """`kind`: type and shape; `hashed`: digest of the bytes of the tensor, or of its entry
        `item`."""
        text = f"{name}:{'' if item is None else item}:{kind}:".encode()
        key = name if item is None else f"{name}[{item}]"
        self._found[key] = int.from_bytes(
            hashlib.blake2b(text + hashed, digest_size=_BYTES).digest(), "little"
        )

    def total(self, *, without: Iterable[str] = ()) -> str:
        """The sum (hex) over all tensors but those."""
        left_out = set(without)
        return _spelled(sum(value for name, value in self._found.items() if name not in left_out))

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """The digests (hex) of those of these tensors that were read."""
        return {name: _spelled(self._found[name]) for name in names if name in self._found}


def check_copies(counted: Mapping[str, str], copies: Mapping[str, str], *, stage: int) -> None:
    """Raises IncompatiblePeerError naming a tensor that a stage read with other bytes than the
    stage that counts it."""
    for name, digest in sorted(copies.items()):
        if name in counted and counted[name] != digest:
            raise IncompatiblePeerError(
                f"stage {stage} has read another {name} than stage 0: digest {digest} there, "
                f"{counted[name]} here"
            )


def _spelled(value: int) -> str:
    return f"{value % (1 << 8 * _BYTES):0{2 * _BYTES}x}"
