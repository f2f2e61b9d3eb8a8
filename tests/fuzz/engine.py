"""Damaged bytes, one parser, and what it may raise. The same seed gives the same cases."""

import random
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SLOW_S = 2.0
MAX_BYTES = 1 << 16
_NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_TEXTS = (
    b"-1",
    b"1e999",
    b"Infinity",
    b"NaN",
    b"9" * 5000,
    b"[" * 3000,
    b"{" * 3000,
    b"\x00",
    b"\xff",
    b"\\u0000",
    b"..",
    b"null",
    b'"',
    b"\n",
    b":",
    b"[",
    b"]",
    b"",
    b"0x1",
    b"18446744073709551616",
)


@dataclass(frozen=True)
class Target:
    """A parser with `valid` input. On damaged input `parse` may raise `allowed` only."""

    name: str
    valid: Callable[[random.Random], bytes]
    parse: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]


@dataclass(frozen=True)
class Finding:
    """Bytes that a target did not refuse as it should; `case` is None for one of the corpus."""

    target: str
    case: int | None
    data: bytes
    problem: str

    def __str__(self) -> str:
        return f"{self.target}, case {self.case}: {self.problem}; {len(self.data)} bytes {self.data[:80]!r}"


def corpus_of(target: Target) -> list[bytes]:
    return [file.read_bytes() for file in sorted((CORPUS / target.name).glob("*.bin"))]


def run(target: Target, *, cases: int, seed: int) -> Iterator[Finding]:
    """Run the corpus, then `cases` damaged inputs."""
    for data in corpus_of(target):
        yield from _tried(target, None, data)
    numbers = random.Random(f"{target.name} {seed}")
    before = _peak_bytes()
    pool = [target.valid(numbers) for _ in range(32)]
    for data in pool:
        target.parse(
            data
        )  # valid input must be accepted: else nothing after the first check is reached
    for case in range(cases):
        if case % 4096 == 4095:
            pool[numbers.randrange(len(pool))] = target.valid(numbers)
        yield from _tried(
            target, case, damaged(numbers, numbers.choice(pool), numbers.choice(pool))
        )
    grown = _peak_bytes() - before
    if grown > 512 << 20:
        yield Finding(target.name, None, b"", f"memory grew by {grown >> 20} MiB")


def damaged(numbers: random.Random, data: bytes, other: bytes) -> bytes:
    """Apply one to four changes."""
    changed = bytearray(data)
    for _ in range(numbers.choice((1, 1, 1, 2, 4))):
        _damage(numbers, changed, other)
    return bytes(changed[:MAX_BYTES])


def _damage(numbers: random.Random, data: bytearray, other: bytes) -> None:
    at, end = sorted(numbers.randrange(len(data) + 1) for _ in range(2))
    match numbers.randrange(8):
        case 0 if data:
            data[at % len(data)] ^= 1 << numbers.randrange(8)
        case 1 if data:
            data[at % len(data)] = numbers.randrange(256)
        case 2:
            width = numbers.choice((1, 2, 4, 8))
            number = numbers.choice(_NUMBERS) + numbers.choice((-1, 0, 0, 1))
            data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        case 3:
            del data[at : min(end, at + 64)]
        case 4:
            del data[at:]
        case 5:
            data[at:at] = data[at:end][:256]
        case 6:
            data[at : at + numbers.choice((0, 1, 2))] = numbers.choice(_TEXTS)
        case _:
            data[at:end] = other[at:end]


def _tried(target: Target, case: int | None, data: bytes) -> Iterator[Finding]:
    began_s = time.thread_time()  # of computing: a busy machine may take any time for it
    try:
        target.parse(data)
    except target.allowed:
        pass
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        yield Finding(target.name, case, data, repr(error)[:300])
    took_s = time.thread_time() - began_s
    if took_s > SLOW_S:
        yield Finding(target.name, case, data, f"computed for {took_s:.1f} s")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
