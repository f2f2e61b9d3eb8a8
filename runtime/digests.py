"""Digests that processes compare.

Pools: a digest names what both must have alike; behind a `+` it may name the draft whose state is
handed over with a prompt. A pool without that part takes prompts without it and hands them over
without it.

Beginnings of prompts: their names are the same in every process, a chain of digests over blocks of
token ids. A block's name stands for all tokens up to its end and for what they were computed with,
so equal names mean equal cache entries. They have 128 bits of BLAKE2b: to find a second text for a
name takes 2**128 tries.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from runtime.errors import IncompatiblePeerError

NAME_BYTES = 16
_ID = "I"  # four bytes on all platforms that Python supports
_DRAFT = "+"
# The parts of a pool's text that have one value, in its order; what follows describes the caches.
_NAMED = (
    "schema",
    "config",
    "weights",
    "kept as",
    "numerics",
    "arithmetic",
    "page size",
    "max context",
)
_NAMED_OF_DRAFT = ("draft", "spec topk")  # a pool without them fits one that has them
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Compatibility:
    """Of a pool: `digest` is compared, `text` is shown when two differ."""

    digest: str
    text: str


def pairing_digest(model: str, draft: str) -> str:
    """`draft` is empty where no draft's state is handed over."""
    return f"{model}{_DRAFT}{draft}" if draft else model


def may_pair(first: str, second: str) -> bool:
    """Whether one pool may hand prompts to the other: the same model, and not two different
    drafts."""
    (model, _, draft), (other_model, _, other_draft) = (
        first.partition(_DRAFT),
        second.partition(_DRAFT),
    )
    return model == other_model and (draft == other_draft or not (draft and other_draft))


def check_compatible(mine: Compatibility, peer_digest: str, peer_text: str) -> None:
    """Raises IncompatiblePeerError showing both sides when they must not be paired."""
    if not may_pair(mine.digest, peer_digest):
        raise IncompatiblePeerError(
            f"the pools differ{named_difference(mine.text, peer_text)}: here {mine.text}; "
            f"there {peer_text}"
        )


def share_draft(first: str, second: str) -> bool:
    """Whether the state of a draft crosses between the two."""
    return may_pair(first, second) and _DRAFT in first and _DRAFT in second


def in_common(first: str, second: str) -> str:
    """What crosses between two pools that may be paired: with the draft only where it does, too."""
    return first if share_draft(first, second) else first.partition(_DRAFT)[0]


def names_draft(digest: str) -> bool:
    """Whether a draft's state is part of what it names."""
    return _DRAFT in digest


def named_difference(mine: str, theirs: str) -> str:
    """Which of the named parts of two pools' texts differ, as " in numerics (exact here, fast
    there)"; empty if none of them does."""
    pairs = [(name, _part(mine, name), _part(theirs, name)) for name in (*_NAMED, *_NAMED_OF_DRAFT)]
    differing = [
        f"{name} ({own} here, {other} there)"
        for name, own, other in pairs
        if own != other and (name in _NAMED or _UNKNOWN not in (own, other))
    ]
    return f" in {', '.join(differing)}" if differing else ""


def _part(text: str, name: str) -> str:
    found = re.search(rf"(?:^|, ){name} ([^,]*)", text)
    return found[1] if found else _UNKNOWN


def block_names(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    compatibility: str,
    salt: str = "",
    known: tuple[bytes, ...] = (),
) -> tuple[bytes, ...]:
    """One name of `NAME_BYTES` per whole block of `block_tokens` ids, in order; `known` are those
    of the first blocks.

    Prompts share names only up to the block in which they first differ, and only where
    `compatibility` (the digest of weights, numerics and cache layout) and `salt` (chosen by whoever
    must not be matched with others) are the same.
    """
    seed = f"{len(compatibility)}:{compatibility}{salt}".encode()
    names = list(known)
    name = names[-1] if names else blake2b(seed, digest_size=NAME_BYTES).digest()
    ids, size = (
        array(_ID, token_ids[len(known) * block_tokens :]).tobytes(),
        block_tokens * array(_ID).itemsize,
    )
    for end in range(size, len(ids) + 1, size):
        name = blake2b(name + ids[end - size : end], digest_size=NAME_BYTES).digest()
        names.append(name)
    return tuple(names)
