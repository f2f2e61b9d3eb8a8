"""Names of the beginnings of prompts, the same in every process: a chain of digests over blocks of token ids.

A block's name stands for all tokens up to its end and for what they were computed with, so equal names mean equal cache
entries. Digests have 128 bits of BLAKE2b: to find a second text for a name takes 2**128 tries.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 16
_ID = "I"  # four bytes on all platforms that Python supports


def block_names(token_ids: Sequence[int], block_tokens: int, *, compatibility: str,
                salt: str = "") -> tuple[bytes, ...]:
    """One name of `NAME_BYTES` per whole block of `block_tokens` ids, in order.

    Prompts share names only up to the block in which they first differ, and only where `compatibility` (the digest of
    weights, numerics and cache layout) and `salt` (chosen by whoever must not be matched with others) are the same.
    """
    seed = f"{len(compatibility)}:{compatibility}{salt}".encode()
    name, names = blake2b(seed, digest_size=NAME_BYTES).digest(), []
    ids, size = array(_ID, token_ids).tobytes(), block_tokens * array(_ID).itemsize
    for end in range(size, len(ids) + 1, size):
        name = blake2b(name + ids[end - size:end], digest_size=NAME_BYTES).digest()
        names.append(name)
    return tuple(names)
