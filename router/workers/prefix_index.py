"""Where prompts can go on: which worker's prefix cache has which resume points, as the workers
report them.

Pure. A worker numbers its reports. One that does not follow the last, and begins no whole account,
is of no use: the worker must be watched anew.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import repeat
from typing import Protocol

from protos import types_pb2, worker_pb2
from runtime.digests import NAME_BYTES, block_names


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt as those see it who choose workers. `salt` and `uses_cache` as in
    `baton.v1.EngineRequest`."""

    token_ids: Sequence[int]
    salt: str = ""
    uses_cache: bool = True
    _names: dict[tuple[int, str], tuple[bytes, ...]] = field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits. A chat is another prompt by another template, a text by another
        tokenizer."""
        ids = self.token_ids if isinstance(self.token_ids, array) else array("I", self.token_ids)
        return blake2b(ids.tobytes(), digest_size=8).hexdigest()

    def block_names(self, page_size: int, compatibility: str) -> tuple[bytes, ...]:
        """Of the blocks that a worker may have and need not compute: all but the last token, which
        draws the next one. Digested once for workers that are alike."""
        if not self.uses_cache:
            return ()
        key = page_size, compatibility
        if key not in self._names:
            self._names[key] = block_names(
                self.token_ids[:-1], page_size, compatibility=compatibility, salt=self.salt
            )
        return self._names[key]


def prompt_of(
    request: types_pb2.EngineRequest, token_ids: Sequence[int] | None = None
) -> RoutedPrompt:
    """`token_ids` are those of the prompt, where they are at hand outside of the message."""
    uses_cache = request.prefix_cache if request.HasField("prefix_cache") else True
    is_scored = request.HasField("num_prompt_logprobs")  # then every token is computed
    return RoutedPrompt(
        request.prompt_token_ids if token_ids is None else token_ids,
        request.cache_salt,
        uses_cache and not is_scored,
    )


class IndexListener(Protocol):
    """Follows what the workers of a router have, all of them together."""

    def placed(self, prompt: RoutedPrompt, page_size: int, compatibility: str) -> None:
        """A prompt was given to a worker whose blocks have so many tokens."""
        ...

    def stored(self, name: bytes) -> None:
        """Some worker has this resume point."""
        ...

    def removed(self, name: bytes) -> None:
        """None has it any more."""
        ...


class PrefixIndex:
    """Of all workers of a router, by address."""

    def __init__(self) -> None:
        self.listener: IndexListener | None = None
        self._holders: dict[bytes, int] = {}  # per name a bit for each worker
        self._held: dict[
            str, bytearray
        ] = {}  # names, one behind the other; some may have been removed since
        self._num_removed: dict[str, int] = {}  # of those
        self._bits: dict[str, int] = {}  # of those that have something
        self._everyone = 0  # all of these bits
        self._workers: list[str] = []  # by the place of their bit
        self._free: list[int] = []  # places of those that were forgotten
        self._num_reports: dict[str, int] = {}
        self._latest: tuple[Sequence[bytes], dict[str, int]] | None = (
            None  # what `depths` found, until a change
        )

    def report(self, worker: str, report: worker_pb2.CacheReport) -> bool:
        """Apply what a worker reports; one that was applied before, or superseded, changes nothing.
        False if one is missing before it."""
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
            names, bit = dict.fromkeys(_names(report.stored)), self._bit(worker)
            # What several data ranks store is removed once, with the last of them.
            held += b"".join(name for name in names if not self._holders.get(name, 0) & bit)
            self._store(list(names), bit)
        if report.removed:
            removed = _names(report.removed)
            self._remove(removed, self._bits.get(worker, 0))
            self._num_removed[worker] = self._num_removed.get(worker, 0) + len(removed)
            if 2 * NAME_BYTES * self._num_removed[worker] > len(held):
                self._tidy(worker)
        return True

    def has_all(self, worker: str, num_reports: int) -> bool:
        """Whether nothing is missing, of so many reports that the worker has sent."""
        return self._num_reports.get(worker, 0) == num_reports

    def forget(self, worker: str) -> None:
        """It has nothing, or nothing is known of it. Idempotent."""
        self._latest = None
        bit = self._bits.pop(worker, 0)
        if bit:
            self._everyone ^= bit
            self._free.append(bit.bit_length() - 1)
        self._remove(_names(bytes(self._held.pop(worker, b""))), bit)
        self._num_removed.pop(worker, None)
        self._num_reports.pop(worker, None)

    def is_held(self, name: bytes) -> bool:
        """Whether some worker has this resume point."""
        return name in self._holders

    def depths(self, names: Sequence[bytes]) -> dict[str, int]:
        """How many of these blocks, in order from a prompt's first, each worker need not compute:
        those up to its deepest resume point among them. Workers that have none are left out. A
        request asks for the same names several times on end: the answer is one dictionary then, for
        nobody to change."""
        if self._latest is None or self._latest[0] is not names:
            self._latest = names, self._found(names)
        return self._latest[1]

    def _found(self, names: Sequence[bytes]) -> dict[str, int]:
        found: dict[str, int] = {}
        if not self._everyone:
            return found
        others = self._everyone  # but those that were found
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
        """Of those that have something."""
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
        """Keep no name that the worker does not have any more, and none twice."""
        bit, holders = self._bits.get(worker, 0), self._holders
        names = dict.fromkeys(_names(bytes(self._held[worker])))
        self._held[worker] = bytearray(
            b"".join(name for name in names if holders.get(name, 0) & bit)
        )
        self._num_removed[worker] = 0

    def _store(self, names: list[bytes], bit: int) -> None:
        holders, new = self._holders, names
        if not holders.keys().isdisjoint(names):
            new = [name for name in names if name not in holders]
            for name in names:
                if name in holders:
                    holders[name] |= bit
        holders.update(
            dict.fromkeys(new, bit)
        )  # the worker's own number: of many workers it is long
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


def _names(joined: bytes) -> list[bytes]:
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
