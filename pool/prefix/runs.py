"""Runs of blocks in a prefix tree, and the sessions that resume after them."""

from array import array
from dataclasses import dataclass, field
from itertools import chain

from engine.core.request import CacheSession


@dataclass(eq=False, slots=True)
class SessionPoints:
    """The newest points of one session, from the oldest to the newest."""

    digest: bytes
    client: bytes
    runs: "dict[BlockRun, None]" = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class BlockRun:
    """Blocks that follow each other without a branch; at least one, except for the root.

    `start` counts the blocks before it. All other attributes describe its last block, after which
    branches begin. The other blocks were not used since and have no snapshot.
    """

    names: list[bytes]
    page_ids: "array[int]"
    parent: "BlockRun | None"
    start: int
    used_s: float
    slot_id: int | None = None  # slot of its snapshot
    num_saved: int = 0  # blocks that need not be computed with this snapshot
    num_children: int = 0
    num_hits: int = 0  # prompts that resumed here
    owner: SessionPoints | None = None  # the session that resumes here, if any
    boost_s: float = 0.0  # what the session adds to its worth

    @property
    def depth(self) -> int:
        """Return the number of blocks from the root to its last one."""
        return self.start + len(self.names)

    def has_at(self, index: int, name: bytes) -> bool:
        """Return whether the block at this index from the root is in the run, and has this name."""
        return self.start <= index < self.depth and self.names[index - self.start] == name

    def pages_to(self, depth: int) -> tuple[int, ...]:
        """Return the pages of the first `depth` blocks, the last of which is in the run."""
        parts = []
        run = self
        while run.parent is not None:
            parts.append(run.page_ids[: depth - run.start])
            depth = run.start
            run = run.parent
        return tuple(chain.from_iterable(reversed(parts)))

    def can_grow(self, session: CacheSession | None) -> bool:
        """Return whether a block of this session, or of none, may join the run after its last."""
        is_own = self.owner is None or (session is not None and session.digest == self.owner.digest)
        return self.is_bare and is_own and not self.num_hits and self.boost_s >= 0

    @property
    def is_bare(self) -> bool:
        """Return whether its last block has neither a branch nor a snapshot. False for the root."""
        return not self.num_children and self.slot_id is None and self.parent is not None
