"""Prefix index: the resume points in the workers' prefix caches, as they report them.

Pure. A worker numbers its reports. A report that neither follows the last one nor begins a complete
listing is not applied: the worker must be watched again from the start.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import repeat
from typing import Protocol

from protos import types_pb2, worker_pb2
from runtime.digests import NAME_BYTES, block_names, split_names


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt in the form used to choose workers. `salt`, `uses_cache` and `adapter`
    as in `baton.v1.EngineRequest`.
    """

    token_ids: Sequence[int]
    salt: str = ""
    uses_cache: bool = True
    adapter: str = ""
    _names: dict[tuple[int, str], tuple[bytes, ...]] = field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def digest(self) -> str:
        """Return a digest of the token ids and the adapter, 16 hexadecimal digits.

        It differs between two chat templates or tokenizers that encode a request differently.
        """
        ids = self.token_ids if isinstance(self.token_ids, array) else array("I", self.token_ids)
        return blake2b(ids.tobytes() + self.adapter.encode(), digest_size=8).hexdigest()

    def block_names(self, page_size: int, compatibility: str) -> tuple[bytes, ...]:
        """Return the names of the blocks that a worker may have cached.

        The last token is left out: it must be computed to sample the next one. Names are digested
        once for workers of one kind.
        """
        if not self.uses_cache:
            return ()
        key = page_size, compatibility
        if key not in self._names:
            self._names[key] = block_names(
                self.token_ids[:-1],
                page_size,
                compatibility=compatibility,
                salt=self.salt,
                adapter=self.adapter,
            )
        return self._names[key]


def prompt_of(
    request: types_pb2.EngineRequest, token_ids: Sequence[int] | None = None
) -> RoutedPrompt:
    """Return the routed prompt of a request. `token_ids`: its prompt, if at hand outside the
    message.
    """
    uses_cache = request.prefix_cache if request.HasField("prefix_cache") else True
    is_scored = request.HasField("num_prompt_logprobs")  # every token must be computed
    return RoutedPrompt(
        request.prompt_token_ids if token_ids is None else token_ids,
        request.cache_salt,
        uses_cache and not is_scored,
        request.adapter,
    )


class IndexListener(Protocol):
    """Observer of the combined prefix caches of a router's workers."""

    def placed(self, prompt: RoutedPrompt, page_size: int, compatibility: str) -> None:
        """Handle a prompt given to a worker with blocks of `page_size` tokens."""
        ...

    def stored(self, name: bytes) -> None:
        """Handle a resume point that a first worker has stored."""
        ...

    def removed(self, name: bytes) -> None:
        """Handle a resume point that no worker has any more."""
        ...


class PrefixIndex:
    """Index over all workers of a router, by address."""

    def __init__(self) -> None:
        self.listener: IndexListener | None = None
        self._holders: dict[bytes, int] = {}  # per name, a bit for each worker
        # Concatenated names of each worker; some may have been removed since.
        self._held: dict[str, bytearray] = {}
        self._num_removed: dict[str, int] = {}  # removed names that `_held` still contains
        self._bits: dict[str, int] = {}  # bit of each worker with cached blocks
        self._everyone = 0  # union of these bits
        self._workers: list[str] = []  # by bit position
        self._free: list[int] = []  # bit positions of forgotten workers
        self._num_reports: dict[str, int] = {}
        # Last result of `depths`, until a change.
        self._latest: tuple[Sequence[bytes], dict[str, int]] | None = None

    def report(self, worker: str, report: worker_pb2.CacheReport) -> bool:
        """Apply a worker's report; return False if an earlier one is missing.

        A report that was applied before, or superseded, changes nothing.
        """
        expected = self._num_reports.get(worker, 0)
        if report.number < expected:
            return True
        if report.whole:
            self.forget(worker)
        elif report.number > expected:
            return False
        self._num_reports[worker] = report.number + 1
        self._latest = None
        held = self._held.setdefault(worker, bytearray())
        if report.stored:
            names = dict.fromkeys(split_names(report.stored))
            bit = self._bit(worker)
            # A name that several data ranks store is removed only once, with the last of them.
            held += b"".join(name for name in names if not self._holders.get(name, 0) & bit)
            self._store(list(names), bit)
        if report.removed:
            removed = split_names(report.removed)
            self._remove(removed, self._bits.get(worker, 0))
            self._num_removed[worker] = self._num_removed.get(worker, 0) + len(removed)
            if 2 * NAME_BYTES * self._num_removed[worker] > len(held):
                self._tidy(worker)
        return True

    def has_all(self, worker: str, num_reports: int) -> bool:
        """Return whether all of the `num_reports` reports that the worker has sent were applied."""
        return self._num_reports.get(worker, 0) == num_reports

    def forget(self, worker: str) -> None:
        """Drop everything known of a worker. Idempotent."""
        self._latest = None
        bit = self._bits.pop(worker, 0)
        if bit:
            self._everyone ^= bit
            self._free.append(bit.bit_length() - 1)
        self._remove(split_names(bytes(self._held.pop(worker, b""))), bit)
        self._num_removed.pop(worker, None)
        self._num_reports.pop(worker, None)

    def is_held(self, name: bytes) -> bool:
        """Return whether some worker has this resume point."""
        return name in self._holders

    def depths(self, names: Sequence[bytes]) -> dict[str, int]:
        """Return how many of these blocks each worker has cached, counted from the prompt's first
        block.

        A worker's count ends at its deepest resume point among them; workers without any are left
        out. A request looks up the same names several times in a row, so the result is cached: do
        not change it.
        """
        if self._latest is None or self._latest[0] is not names:
            self._latest = names, self._found(names)
        return self._latest[1]

    @property
    def is_empty(self) -> bool:
        """Return whether no worker has a resume point."""
        return not self._holders

    def _found(self, names: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        if not self._everyone:
            return found
        others = self._everyone  # workers not found yet
        depth = len(names) + 1
        for holders in map(self._holders.get, reversed(names), repeat(0)):
            depth -= 1
            here = holders & others
            if not here:
                continue
            others ^= here
            while here:
                place = here.bit_length() - 1
                found[self._workers[place]] = depth
                here ^= 1 << place
            if not others:
                break
        return found

    def _bit(self, worker: str) -> int:
        """Return the bit of a worker, allocating one if needed."""
        if worker not in self._bits:
            if not self._free:
                self._free.append(len(self._workers))
                self._workers.append("")
            place = self._free.pop()
            self._workers[place] = worker
            self._bits[worker] = 1 << place
            self._everyone |= 1 << place
        return self._bits[worker]

    def _tidy(self, worker: str) -> None:
        """Drop names that the worker no longer has, and duplicates."""
        bit = self._bits.get(worker, 0)
        holders = self._holders
        names = dict.fromkeys(split_names(bytes(self._held[worker])))
        self._held[worker] = bytearray(
            b"".join(name for name in names if holders.get(name, 0) & bit)
        )
        self._num_removed[worker] = 0

    def _store(self, names: list[bytes], bit: int) -> None:
        holders = self._holders
        new = names
        if not holders.keys().isdisjoint(names):
            new = [name for name in names if name not in holders]
            for name in names:
                if name in holders:
                    holders[name] |= bit
        holders.update(
            dict.fromkeys(new, bit)
        )  # shares one int object: it is long for many workers
        if self.listener is not None:
            for name in new:
                self.listener.stored(name)

    def _remove(self, names: Iterable[bytes], bit: int) -> None:
        holders = self._holders
        for name in names:
            before = holders.get(name, 0)
            if before != bit and (rest := before & ~bit):
                holders[name] = rest
            elif before:
                del holders[name]
                if self.listener is not None:
                    self.listener.removed(name)


@dataclass(frozen=True)
class RoleCaches:
    """What the workers of one role report of their caches.

    Attributes:
        memory: the resume points in their prefix caches.
        copies: those in tiers of their own, of workers that prefill.
    """

    memory: PrefixIndex = field(default_factory=PrefixIndex)
    copies: PrefixIndex = field(default_factory=PrefixIndex)

    def forget(self, worker: str) -> None:
        """Drop everything known of a worker. Idempotent."""
        self.memory.forget(worker)
        self.copies.forget(worker)

    def has_all(self, worker: str, load: worker_pb2.WorkerLoad) -> bool:
        """Return whether all reports that the worker sent before this load were applied."""
        return self.memory.has_all(worker, load.cache_reports) and self.copies.has_all(
            worker, load.copy_reports
        )
