"""Compilation, caching and launching of the kernels that numba compiles for the host.

A kernel is a C function of one argument, the address of a record of sizes and addresses. Every
thread of a team calls it, and the threads share the work through an atomic item counter. A kernel
cannot raise, so it also counts the completed items. The threads are torch's own.

A kernel allocates nothing. Each thread has a seat, a part of the memory that the launch holds until
all threads are done. An array allocated by numba would be freed after the last use of its variable,
even if its address is still in use.
"""

import ctypes
import logging
import os
import re
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from engine.kernels.host.codegen.file_lock import alone
from engine.kernels.host.codegen.launch_recorder import recorders
from runtime.errors import InternalError

logger = logging.getLogger(__name__)

TORCH_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_IMPORT = re.compile(
    r"^from (engine\.kernels\.host[\w.]*) import (?:\(([^)]*)\)|([^\n(]+))", re.MULTILINE
)
_FORM = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Team:
    """A launcher of functions on the same threads as torch's products.

    OpenMP's threads wait for work by spinning, so threads of another pool would have to share their
    cores with them.
    """

    def __init__(self) -> None:
        # GOMP_parallel(function, data, num_threads, flags) starts a parallel region in code of gcc.
        # torch ships a library with this function; other OpenMP libraries provide it as well.
        self._parallel = _gomp_parallel()

    def run(self, function: int, argument: int, *, num_parts: int) -> None:
        """Call the C function `void (*)(void *)` at this address on every thread, and wait for all.

        At most `num_parts` threads are used. The function divides the work among them.
        """
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
    """Return GOMP_parallel, or None if torch has no OpenMP or its library has another name."""
    form = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    try:
        return form(("GOMP_parallel", ctypes.CDLL(str(TORCH_LIBRARY))))
    except (AttributeError, OSError):
        return None


def parallel_address() -> int:
    """Return the address of GOMP_parallel; 0 if it is not available."""
    parallel = _gomp_parallel()
    return 0 if parallel is None else ctypes.cast(parallel, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


# numba has no bf16 and works on its bits.
STORED_AS = {
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
}
# Fast math that preserves NaN.
NUMBERS = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}
# Functions that kernels call are inlined. A separate function would be a symbol. A process that has
# just compiled it and one that has loaded the kernel could resolve it to code with different bits.
PART = {**NUMBERS, "inline": "always"}
# Operations in source order, with one rounding each, for kernels whose sums have a defined order
# (`dot.py`).
STRICT = {"error_model": "numpy"}
STRICT_PART = {**STRICT, "inline": "always"}
# indices of these fields in every record
NEXT = 0
DONE = 1
NUM_ITEMS = 2
SEATS = 3
SCRATCH = 4
_LINE_BYTES = 64  # of a cache; seats share no line
# Processes of a host that start together would all compile the same kernels. So one process
# compiles, and the others load. Each kernel of each installation has its own lock, so a stalled
# compilation blocks no other kernel.
LOCK_FILE = Path(tempfile.gettempdir()) / f"baton-kernels-{os.getuid()}.lock"
PATIENCE_S = 60.0  # the slowest kernel takes 13 s of one core, and all cores may be busy


class Attempt(Enum):
    """The behavior of `compile_kernel` for a kernel that is locked or not cached."""

    WAIT = "wait for the other, or compile"
    UNLOCKED = "compile, but where another has it raise KernelLockedError"
    LOAD = "raise KernelMissingError, or KernelLockedError"


class KernelLockedError(Exception):
    """Another process is compiling the kernel."""


class KernelMissingError(Exception):
    """No process has compiled the kernel yet."""


_attempt: ContextVar[Attempt] = ContextVar("attempt", default=Attempt.WAIT)


@contextmanager
def trying(attempt: Attempt) -> Iterator[None]:
    """Set the behavior of `compile_kernel` in this thread during the block."""
    token = _attempt.set(attempt)
    try:
        yield
    finally:
        _attempt.reset(token)


def has_kernels(*dtypes: torch.dtype) -> bool:
    """Return whether host kernels support all of these dtypes."""
    return all(dtype in STORED_AS for dtype in dtypes)


def dense_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, D] or [T, heads, D] with each token's values contiguous.

    A view of wider tokens is returned as a view.

    Raises:
        InternalError: x has another number of dimensions.
    """
    if x.dim() not in (2, 3):
        raise InternalError(
            f"tokens of shape {tuple(x.shape)} are neither [T, D] nor [T, heads, D]"
        )
    return (
        x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]) else x.contiguous()
    )


def record(*integers: str, **others: type) -> np.dtype:
    """Return the dtype of a kernel's argument record.

    Common fields: `next`, the first item that no thread has taken; `done`, the number of completed
    items; `num_items`; `seats`, the number of threads with a seat; `scratch` and `scratch_bytes`,
    the address of the first seat and the size of one. The kernel's own fields follow; `integers`
    are int64.
    """
    shared = ("next", "done", "num_items", "seats", "scratch", "scratch_bytes")
    return np.dtype([*((name, np.int64) for name in (*shared, *integers)), *others.items()])


def load_numba() -> None:
    """Load numba's compiler, which takes a third of a second, before a request needs it."""
    cfunc(types.int64(types.int64))(lambda number: number)


@cache
def source_files(module: str) -> tuple[str, ...]:
    """Return the files of a host kernel's module and of the host modules that it imports.

    Imports of imports are included, so every function that numba inlines is in one of the files.
    """
    found: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = str(sys.modules[name].__file__)
            pending += _host_imports(Path(found[name]).read_text(encoding="utf-8"))
    return tuple(found[name] for name in sorted(found))


def _host_imports(source: str) -> list[str]:
    """Return the host modules that a source imports at the top of the file."""
    names: list[str] = []
    for package, several, one in _IMPORT.findall(source):
        imported = [part.split()[0] for part in (several or one).split(",") if part.strip()]
        modules = [f"{package}.{name}" for name in imported if f"{package}.{name}" in sys.modules]
        names += modules if len(modules) == len(imported) else [*modules, package]
    return names


def compile_kernel(
    work, arguments: np.dtype, name: str, *, numbers: Mapping[str, object] = NUMBERS
):
    """Compile `work`, a function created for this call, to a C function.

    The code is cached for later processes under the name and a digest of `source_files`, so another
    version is never loaded. `numbers` is NUMBERS or STRICT.

    Raises:
        KernelLockedError, KernelMissingError: within `trying`, see `Attempt`.
    """
    files = (*source_files(work.__module__), __file__)
    digest = xxh3_64_hexdigest(b"".join(Path(file).read_bytes() for file in files))
    work.__qualname__ = f"{name}_{digest}"
    subject = xxh3_64_intdigest(f"{__file__} {work.__qualname__}".encode()) >> 1
    options = {"sig": types.void(types.CPointer(numba.from_dtype(arguments))), **numbers}
    attempt = _attempt.get()
    if_missing = {"pipeline_class": _refuse} if attempt is Attempt.LOAD else {}
    # A cached kernel is loaded without the lock: numba renames complete files into place, and a
    # process with another cache folder may hold the lock for as long as it compiles.
    with suppress(Exception):
        return cfunc(**options, pipeline_class=_refuse, cache=True)(work)
    try:
        with alone(
            LOCK_FILE, subject, timeout_s=PATIENCE_S if attempt is Attempt.WAIT else 0.0
        ) as is_held:
            if not is_held and attempt is not Attempt.WAIT:
                raise KernelLockedError(name)
            return cfunc(**options, **if_missing, cache=True)(work)
    except (KernelLockedError, KernelMissingError):
        raise
    except Exception as error:
        if attempt is Attempt.LOAD:
            raise KernelMissingError(name) from error
        # Without a folder `precompile` has logged it for all kernels.
        level = logging.DEBUG if kept_in() is None else logging.INFO
        logger.log(level, "kernel %s is not kept, each process compiles it: %r", name, error)
        return cfunc(**options)(work)


def kept_in() -> Path | None:
    """Return the cache folder of compiled kernels; None if numba finds no writable folder."""
    try:
        return Path(FunctionCache(load_numba).cache_path)
    except RuntimeError:
        return None


def _refuse(*context: object) -> object:
    """Raise in place of numba's compiler."""
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
    """Run the kernel on a record of this dtype.

    The record holds these numbers and the addresses of these tensors, which are kept until the
    kernel is done; other fields are 0. Each thread has a seat of `scratch_bytes`, aligned to a
    cache line, with arbitrary content.

    Raises:
        InternalError: some items were not completed.
    """
    if not num_items:
        return
    arguments = np.zeros(1, kind)
    seats = _seats(num_items, scratch_bytes)
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
    """Run a kernel whose record has only integers; `integers` are the kernel's own.

    It is much faster than `launch`. The caller keeps the memory of the addresses among them.

    Raises:
        InternalError: some items were not completed.
    """
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
    """Allocate the seats, [threads, bytes]."""
    num_bytes = -(-scratch_bytes // _LINE_BYTES) * _LINE_BYTES
    return torch.empty(min(torch.get_num_threads(), num_items), num_bytes, dtype=torch.uint8)


@cache
def bits_of(number: float) -> int:
    """Return the fp32 bits of a number, for a record of integers.

    `number_of` is the inverse in a kernel.
    """
    return int(np.float32(number).view(np.uint32))


def _check(done: int, wanted: int) -> None:
    if done != wanted:
        raise InternalError(f"a kernel ended after {done} of {wanted} parts")


def wide(x):
    """Return x as fp32; bf16 is passed as its bits."""
    raise NotImplementedError("for compiled code only")


@overload(wide)
def _wide(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def rounded(x, stored):
    """Round fp32 to the given dtype, to nearest, ties to even."""
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
    """Return the address as a pointer to elements of this dtype."""
    pointer = types.CPointer(element.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, element), generate


@intrinsic
def count_up(typing, pointer, field):
    """Increment this field of the record atomically; return the previous value."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", builder.gep(address, [arguments[1]]), one, "monotonic")

    return types.int64(pointer, types.int64), generate


@intrinsic
def counted_so_far(typing, pointer, field):
    """Return the value that `count_up` of this field would return now."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(arguments[0], context.get_value_type(types.CPointer(types.int64)))
        return builder.load_atomic(builder.gep(address, [arguments[1]]), "monotonic", 8)

    return types.int64(pointer, types.int64), generate


@njit(**STRICT_PART)
def number_of(bits):
    return np.uint32(bits).view(np.float32)


@njit(**STRICT_PART)
def take_seat(pointer):
    """Return the address of this thread's memory until the launch ends; call it once per thread."""
    a = carray(pointer, 1)[0]
    return a.scratch + count_up(pointer, SEATS) * a.scratch_bytes
