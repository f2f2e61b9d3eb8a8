"""What kernels that numba compiles for the host share: how they are kept, called and fed.

A kernel is a C function of one argument, the address of a record of sizes and addresses. Every
thread of a team calls it, and they share the work by counting items up. It cannot raise, so it also
counts what is done. The threads are torch's own.

A kernel allocates nothing: what a thread needs beside its registers is its seat, a part of the
memory that the launch holds until all threads are done. numba frees an array of its own behind the
last use of the variable, and that its address was taken is no use to it.
"""

import ctypes
import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Protocol

import numba
import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from engine.kernels.host.codegen.file_lock import alone
from runtime.errors import InternalError

logger = logging.getLogger(__name__)

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_FORM = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """Runs a function on as many threads as torch's products have, and on the same ones: OpenMP's
    threads wait for work by spinning, so threads of another pool would have to share their cores
    with them."""

    def __init__(self) -> None:
        # GOMP_parallel(function, data, num_threads, flags) is how gcc's code starts a parallel
        # region; torch brings the library that has it, and another OpenMP than gcc's answers to
        # this name, too.
        self._parallel = _gomp_parallel()

    def run(self, function: int, argument: int, *, num_parts: int) -> None:
        """Call the C function `void (*)(void *)` at that address with the argument, on every
        thread, but not on more than there are parts; returns when all have. They must agree among
        themselves who does what."""
        num_threads = min(torch.get_num_threads(), num_parts)
        if num_threads <= 1 or self._parallel is None:
            _callable(function)(argument)
        else:
            self._parallel(function, argument, num_threads, 0)


@cache
def _callable(function: int) -> Callable[[int], None]:
    return _FORM(function)


@cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """None in a build of torch without OpenMP, or with another name for its library."""
    form = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    try:
        return form(("GOMP_parallel", ctypes.CDLL(str(_LIBRARY))))
    except (AttributeError, OSError):
        return None


def parallel_address() -> int:
    """Of GOMP_parallel; 0 where there is none."""
    parallel = _gomp_parallel()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


STORED_AS = {
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
}  # numba has no bf16, only its bits
NUMBERS = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}  # NaN stays NaN
# Functions that kernels call become part of them. A called one would be a symbol that a process
# which has just compiled it, and one that has loaded the kernel, resolve to code of different bits.
PART = {**NUMBERS, "inline": "always"}
# Operations in the order in which they are written, one rounding each: for kernels whose sums have
# an order (`dot.py`).
STRICT = {"error_model": "numpy"}
STRICT_PART = {**STRICT, "inline": "always"}
NEXT, DONE, NUM_ITEMS, SEATS, SCRATCH = 0, 1, 2, 3, 4  # the places of these fields in every record
_LINE_BYTES = 64  # of a cache: seats share none
# The processes of a host that start together would all compile the same kernels; so one does, and
# the others load them. Each kernel of each installation is locked by itself: whoever compiles one
# and stands still holds up no other.
LOCK_FILE = Path(tempfile.gettempdir()) / f"baton-kernels-{os.getuid()}.lock"
PATIENCE_S = 60.0  # the slowest kernel takes 13 s of a core of its own, and there may be none


class Attempt(Enum):
    """What `compile_kernel` does about a kernel that is not kept, or that another process has
    locked."""

    WAIT = "wait for the other, or compile"
    UNLOCKED = "compile, but where another has it raise KernelLockedError"
    LOAD = "raise KernelMissingError, or KernelLockedError"


class KernelLockedError(Exception):
    """Another process compiles it, or is about to load it."""


class KernelMissingError(Exception):
    """No process has compiled it yet."""


class LaunchRecorder(Protocol):
    """Notes what kernels were called with, to call them so again."""

    def add_launch(self, function: int, arguments: bytes, seat_bytes: int) -> None:
        """The C function at that address has been called with this record, on seats of so many
        bytes together."""
        ...


recorders: ContextVar[LaunchRecorder | None] = ContextVar(
    "recorders", default=None
)  # of this thread's launches
_attempt: ContextVar[Attempt] = ContextVar("attempt", default=Attempt.WAIT)


@contextmanager
def trying(attempt: Attempt) -> Iterator[None]:
    """For what this thread calls within the block."""
    token = _attempt.set(attempt)
    try:
        yield
    finally:
        _attempt.reset(token)


def has_kernels(*dtypes: torch.dtype) -> bool:
    """Whether host kernels take all of these types."""
    return all(dtype in STORED_AS for dtype in dtypes)


def dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """x [T, D] or [T, heads, D] with each token's values side by side; a view of wider tokens stays
    one."""
    if x.dim() not in (2, 3):
        raise InternalError(
            f"tokens of shape {tuple(x.shape)} are neither [T, D] nor [T, heads, D]"
        )
    return (
        x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) else x.contiguous()
    )


def record(*integers: str, **others: type) -> np.dtype:
    """The arguments of a kernel: `next`, the first item that no thread has taken; `done`, how many
    are finished; `num_items`; `seats`, how many threads have a seat, where the first lies and how
    long one is; then the kernel's own, of which these are integers."""
    shared = ("next", "done", "num_items", "seats", "scratch", "scratch_bytes")
    return np.dtype([*((name, np.int64) for name in (*shared, *integers)), *others.items()])


def load_numba() -> None:
    """What numba loads before its first kernel: a third of a second, and no request has to wait for
    it."""
    cfunc(types.int64(types.int64))(lambda number: number)


def compile_kernel(
    work, arguments: np.dtype, name: str, *sources: str, numbers: Mapping[str, object] = NUMBERS
):
    """The C function that `work`, a function made for this call, compiles to. Its code is kept for
    later processes by the name and a digest of the files `sources` (its own, and those whose
    functions are part of it) and this one: nothing finds another version's. `numbers`: NUMBERS or
    STRICT.

    Raises:
        KernelLockedError, KernelMissingError: within `trying`, see `Attempt`.
    """
    files = [Path(source).read_bytes() for source in (*sources, __file__)]
    work.__qualname__ = f"{name}_{xxh3_64_hexdigest(b''.join(files))}"
    subject = xxh3_64_intdigest(f"{__file__} {work.__qualname__}".encode()) >> 1
    options = {"sig": types.void(types.CPointer(numba.from_dtype(arguments))), **numbers}
    attempt = _attempt.get()
    if_missing = {"pipeline_class": _refuse} if attempt is Attempt.LOAD else {}
    try:
        with alone(
            LOCK_FILE, subject, patience_s=PATIENCE_S if attempt is Attempt.WAIT else 0.0
        ) as is_held:
            if not is_held and attempt is not Attempt.WAIT:
                raise KernelLockedError(name)
            return cfunc(**options, **if_missing, cache=True)(work)
    except (KernelLockedError, KernelMissingError):
        raise
    except Exception as error:
        if attempt is Attempt.LOAD:
            raise KernelMissingError(name) from error
        level = (
            logging.DEBUG if kept_in() is None else logging.INFO
        )  # `ahead` has said so, for all of them
        logger.log(level, "kernel %s is not kept, each process compiles it: %r", name, error)
        return cfunc(**options)(work)


def kept_in() -> Path | None:
    """Return the folder that compiled kernels are kept in; None where numba finds none that it may
    write to."""
    try:
        return Path(FunctionCache(load_numba).cache_path)
    except RuntimeError:
        return None


def _refuse(*context: object) -> object:
    """In place of numba's compiler."""
    raise KernelMissingError


def launch(
    kernel,
    kind: np.dtype,
    team: Team,
    /,
    *,
    num_items: int,
    scratch_bytes: int = 0,
    **values: torch.Tensor | float,
) -> None:
    """Run the kernel on a record of that kind with these numbers, the addresses of these tensors,
    which are kept until it is done, and 0 for what is not given. Each thread has a seat of
    `scratch_bytes`, on a cache line's boundary, with anything in it.

    Raises:
        InternalError: not all items were done.
    """
    if not num_items:
        return
    arguments, seats = np.zeros(1, kind), _seats(num_items, scratch_bytes)
    for name, value in (*values.items(), ("num_items", num_items), ("scratch", seats)):
        arguments[name] = value.data_ptr() if isinstance(value, torch.Tensor) else value
    arguments["scratch_bytes"] = seats.shape[1]
    team.run(kernel.address, arguments.ctypes.data, num_parts=num_items)
    _check(int(arguments["done"][0]), num_items)
    if (recorder := recorders.get()) is not None:
        recorder.add_launch(kernel.address, arguments.tobytes(), seats.numel())


def launch_integers(
    kernel, num_items: int, integers: Sequence[int], team: Team, *, scratch_bytes: int = 0
) -> None:
    """`launch` for a record that has nothing but integers, of which these are the kernel's own:
    much less work to fill. The caller keeps what lies at the addresses among them."""
    if not num_items:
        return
    seats = _seats(num_items, scratch_bytes) if scratch_bytes else _NO_SEATS
    arguments = array("q", (0, 0, num_items, 0, seats.data_ptr(), seats.shape[1], *integers))
    team.run(kernel.address, arguments.buffer_info()[0], num_parts=num_items)
    _check(arguments[DONE], num_items)
    if (recorder := recorders.get()) is not None:
        recorder.add_launch(kernel.address, arguments.tobytes(), seats.numel())


_NO_SEATS = torch.empty(0, 0, dtype=torch.uint8)


def _seats(num_items: int, scratch_bytes: int) -> torch.Tensor:
    """[threads, bytes]"""
    num_bytes = -(-scratch_bytes // _LINE_BYTES) * _LINE_BYTES
    return torch.empty(min(torch.get_num_threads(), num_items), num_bytes, dtype=torch.uint8)


@cache
def bits_of(number: float) -> int:
    """The bits of a number in fp32, for a record of integers; a kernel has it back by
    `number_of`."""
    return int(np.float32(number).view(np.uint32))


def _check(done: int, wanted: int) -> None:
    if done != wanted:
        raise InternalError(f"a kernel ended after {done} of {wanted} parts")


def wide(x):
    """x as fp32; bf16 comes as its bits."""
    raise NotImplementedError("for compiled code only")


@overload(wide)
def _wide(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def rounded(x, stored):
    """fp32 as it is stored in that type: to the nearest, of two to the even one."""
    raise NotImplementedError("for compiled code only")


@overload(rounded)
def _rounded(x, stored):
    if stored.dtype == types.uint16:

        def to_bf16(x, stored):
            bits = np.float32(x).view(np.uint32)
            nearest = np.uint32(
                bits
                + np.uint32(0x7FFF)
                + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            )
            return np.uint16(np.uint32(nearest >> np.uint32(16)) if x == x else np.uint32(0x7FC0))

        return to_bf16
    return lambda x, stored: np.float32(x)


@intrinsic
def pointer_to(typing, address, element):
    """The address as a pointer to elements of that type."""
    pointer = types.CPointer(element.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, element), generate


@intrinsic
def count_up(typing, pointer, field):
    """One more in this field of the arguments, whichever thread counts. Returns what was there
    before."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", builder.gep(address, [arguments[1]]), one, "monotonic")

    return types.int64(pointer, types.int64), generate


@intrinsic
def counted_so_far(typing, pointer, field):
    """What `count_up` of this field would return now."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.load_atomic(builder.gep(address, [arguments[1]]), "monotonic", 8)

    return types.int64(pointer, types.int64), generate


@njit(**STRICT_PART)
def number_of(bits):
    return np.uint32(bits).view(np.float32)


@njit(**STRICT_PART)
def take_seat(pointer):
    """The address of memory that is this thread's until the launch ends; once for each thread."""
    a = carray(pointer, 1)[0]
    return a.scratch + count_up(pointer, SEATS) * a.scratch_bytes
