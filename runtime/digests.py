"""Compatibility digests of pools, digests of prompts and names of prefix blocks.

Pools: a digest names the properties that two paired pools must share. After a `+` it may name the
draft model whose state is handed over with a prompt. A pool without a draft accepts prompts without
that state and hands them over without it.

Prompts: a digest of all token ids, by which a pool knows whose state another one offers.

Prefix blocks: every process computes the same names, a chain of digests over blocks of token ids. A
block's name identifies all tokens up to its end and the model that computed them, so equal names
mean equal cache entries. Names are 128 bits of BLAKE2b: to find a second text for a given name
takes 2**128 tries.
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
# The parts of a pool's text that have a single value, in its order; descriptions of the caches
# follow.
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
_NAMED_OF_DRAFT = ("draft", "spec topk")  # a pool without them is compatible with one that has them
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Compatibility:
    """Compatibility of a pool. `digest` is compared; `text` is shown when two digests differ."""

    digest: str
    text: str


def pairing_digest(model: str, draft: str) -> str:
    """Join the two digests; `draft` is empty if no draft state is handed over."""
    return f"{model}{_DRAFT}{draft}" if draft else model


def may_pair(first: str, second: str) -> bool:
    """Return whether one pool may hand prompts to the other.

    They must have the same model and must not have two different drafts.
    """
    (model, _, draft), (other_model, _, other_draft) = (
        first.partition(_DRAFT),
        second.partition(_DRAFT),
    )
    return model == other_model and (draft == other_draft or not (draft and other_draft))


def check_compatible(mine: Compatibility, peer_digest: str, peer_text: str) -> None:
    """Raise IncompatiblePeerError, showing both sides, if the two pools must not be paired."""
    if not may_pair(mine.digest, peer_digest):
        raise IncompatiblePeerError(
            f"the pools differ{named_difference(mine.text, peer_text)}: here {mine.text}; "
            f"there {peer_text}"
        )


def share_draft(first: str, second: str) -> bool:
    """Return whether the state of a draft is handed over between the two pools."""
    return may_pair(first, second) and _DRAFT in first and _DRAFT in second


def in_common(first: str, second: str) -> str:
    """Return the digest of the state that two compatible pools exchange.

    It includes the draft only if both pools share it.
    """
    return first if share_draft(first, second) else first.partition(_DRAFT)[0]


def names_draft(digest: str) -> bool:
    """Return whether the digest includes a draft's state."""
    return _DRAFT in digest


def named_difference(mine: str, theirs: str) -> str:
    """Return the named parts in which two pools' texts differ, or "" if there is none.

    The form is " in numerics (exact here, fast there)".
    """
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
    adapter: str = "",
    known: tuple[bytes, ...] = (),
) -> tuple[bytes, ...]:
    """Return one name of `NAME_BYTES` bytes per whole block of `block_tokens` ids, in order.

    `known` holds the names of the first blocks. Prompts share names only up to the block in which
    they first differ. They share none if `compatibility` (the digest of weights, numerics and cache
    layout), `adapter` or `salt` differs. A client chooses a salt to keep its prompts from matching
    those of others.
    """
    kind = f"{compatibility}@{adapter}" if adapter else compatibility
    seed = f"{len(kind)}:{kind}{salt}".encode()
    names = list(known)
    name = names[-1] if names else blake2b(seed, digest_size=NAME_BYTES).digest()
    ids = array(_ID, token_ids[len(known) * block_tokens :]).tobytes()
    size = block_tokens * array(_ID).itemsize
    for end in range(size, len(ids) + 1, size):
        name = blake2b(name + ids[end - size : end], digest_size=NAME_BYTES).digest()
        names.append(name)
    return tuple(names)


def prompt_digest(token_ids: Sequence[int], adapter: str = "") -> bytes:
    """Return a digest of `NAME_BYTES` bytes of a whole prompt and the adapter that reads it."""
    digest = blake2b(f"{len(adapter)}:{adapter}".encode(), digest_size=NAME_BYTES)
    digest.update(array(_ID, token_ids).tobytes())
    return digest.digest()


def split_names(joined: bytes) -> list[bytes]:
    """Return the names of blocks in their concatenation; a last one that is cut is shorter."""
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
