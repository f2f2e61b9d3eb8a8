"""A digest over every byte of a model's weights, computed while stages read them.

Each tensor has its own digest, or each entry of a stack that is read by entry. It covers the bytes,
and the name, dtype and shape as the file states them. A set of tensors has the sum of these digests
modulo 2^128. The sum depends neither on the order of reading nor on the stage that read a tensor.
So the sums of a pool's stages add up to the same number for every split of its layers. A sum does
not protect against forgery: an attacker could as well replace the files on all hosts. It detects
files that differ, which is the error that occurs in practice.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runtime.errors import IncompatiblePeerError

_BYTES = 16


@dataclass(frozen=True)
class StageDigests:
    """The digests of the weights that one stage has read, all in hex.

    `total` is the sum over the tensors that this stage counts. `copies` has the digests of tensors
    that another stage counts, by name. `draft_total` is the sum over the draft's own tensors, or
    empty without a draft.
    """

    total: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    draft_total: str = ""


@dataclass(frozen=True)
class PoolWeights:
    """The sums over the weights that all stages of a pool have read, in hex."""

    total: str
    draft_total: str = ""

    @classmethod
    def of(cls, stages: Iterable[StageDigests]) -> "PoolWeights":
        found = list(stages)
        drafts = [stage.draft_total for stage in found if stage.draft_total]
        return cls(
            _spelled(sum(int(stage.total, 16) for stage in found if stage.total)),
            drafts[-1] if drafts else "",
        )

    def revision(self, description: str) -> str:
        """Return the model's revision in hex. `description` is the digest of config and names."""
        return hashlib.blake2b(
            f"{description} {self.total}".encode(), digest_size=_BYTES
        ).hexdigest()

    def draft_revision(self, description: str) -> str:
        """Return the revision of the draft, as `revision` does for the model."""
        return hashlib.blake2b(
            f"{description} {self.draft_total}".encode(), digest_size=_BYTES
        ).hexdigest()


class WeightsDigest:
    """A digest of the tensors that one process reads. A tensor that is read twice counts once."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}

    def add(self, name: str, kind: str, hashed: bytes, *, item: int | None = None) -> None:
        """Add a tensor, or its entry `item`.

        `kind` has its dtype and shape, `hashed` the digest of its bytes.
        """
        text = f"{name}:{'' if item is None else item}:{kind}:".encode()
        key = name if item is None else f"{name}[{item}]"
        self._found[key] = int.from_bytes(
            hashlib.blake2b(text + hashed, digest_size=_BYTES).digest(), "little"
        )

    def total(self, *, without: Iterable[str] = ()) -> str:
        """Return the sum over all tensors except `without`, in hex."""
        left_out = set(without)
        return _spelled(sum(value for name, value in self._found.items() if name not in left_out))

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the digests of those of `names` that were read, in hex."""
        return {name: _spelled(self._found[name]) for name in names if name in self._found}


def check_copies(counted: Mapping[str, str], copies: Mapping[str, str], *, stage: int) -> None:
    """Check that a stage read the same bytes as the stage that counts a tensor.

    Raises:
        IncompatiblePeerError: the bytes differ. The message names the tensor.
    """
    for name, digest in sorted(copies.items()):
        if name in counted and counted[name] != digest:
            raise IncompatiblePeerError(
                f"stage {stage} has read a different {name} than stage 0: digest {digest} there, "
                f"{counted[name]} here"
            )


def _spelled(value: int) -> str:
    return f"{value % (1 << 8 * _BYTES):0{2 * _BYTES}x}"
