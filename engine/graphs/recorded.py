"""Recordings of work on the host: kernel launches, and the torch operations between them.

A recording reads and writes the memory that it had when it was recorded. It runs no Python of the
function and decides nothing. So shapes, lengths and everything else that the function decided on
must be the same in each run. What differs between two runs is in tensors that are refilled before a
replay.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.host.codegen.compiled import Team, has_kernels
from engine.kernels.host.codegen.launch_recorder import recorders
from engine.kernels.host.codegen.program import Launch, Program
from engine.kernels.host.tokens.row_ops import (
    add_rows,
    copy_rows,
    gather_rows,
    join_rows,
    largest_of_rows,
)

_ops = torch.ops.aten
_ALLOCATIONS = {
    _ops.empty.memory_format,
    _ops.empty_like.default,
    _ops.new_empty.default,
    _ops.empty_strided.default,
}
# these convert to another dtype at most
_COPIES = {_ops.to.dtype, _ops.contiguous.default, _ops.clone.default}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_ALIGNED_TO = 64  # bytes of a cache line
_CHUNK_BYTES = 4 << 20
_UNKNOWN_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class CannotRecordError(Exception):
    """The function's work depends on values, or is not an operation on tensors.

    The message names the first such operation.
    """


class Recording:
    """The recorded work of one function."""

    def __init__(self, steps: Sequence[Callable[[], object]], kept: Sequence[object]) -> None:
        self._steps = steps
        self._kept = kept

    @property
    def num_steps(self) -> int:
        """Return the number of calls from Python. Each call may be many launches."""
        return len(self._steps)

    def replay(self) -> None:
        """Run the recorded work again.

        Raises:
            InternalError: a kernel did not complete its work.
        """
        for step in self._steps:
            step()


class Arena:
    """Memory for recordings that are never replayed at the same time.

    Recordings overwrite each other's contents. Within a recording, memory is reused as soon as no
    tensor needs it, because each replay launches in the same order.
    """

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self.begin()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._chunks))

    def begin(self) -> None:
        """Begin a new recording, which may use all of the memory."""
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._rests = list(self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of arena memory, as torch.empty does."""
        wanted = math.prod(shape) * dtype.itemsize
        size = -(-max(wanted, 1) // _ALIGNED_TO) * _ALIGNED_TO
        free = self._free[size]
        block = free.pop() if free else self._taken(size)
        # The block is free again when this array dies. A tensor over the array, or a view of it,
        # keeps the array alive.
        lent = block[:wanted]
        finalize(lent, free.append, block)
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _taken(self, size: int) -> np.ndarray:
        """Return a block from the first chunk with enough free memory, or from a new chunk."""
        place = next((place for place, rest in enumerate(self._rests) if len(rest) >= size), None)
        if place is None:
            num_bytes = max(size, _CHUNK_BYTES)
            chunk = np.empty(num_bytes + _ALIGNED_TO, np.uint8)
            chunk = chunk[-chunk.ctypes.data % _ALIGNED_TO :][:num_bytes]
            place = len(self._chunks)
            self._chunks.append(chunk)
            self._rests.append(chunk)
        rest = self._rests[place]
        self._rests[place] = rest[size:]
        return rest[:size]


def record(function: Callable[[], object], arena: Arena) -> Recording:
    """Run the function once, to its end, and record its work.

    Raises:
        CannotRecordError: it did something that cannot be recorded. Its effects are complete.
    """
    arena.begin()
    notes = _Notes(arena)
    token = recorders.set(notes)
    try:
        with notes, _NoValues():
            function()
    finally:
        recorders.reset(token)
    return notes.recording()


def also_do(call: Callable[[], object]) -> None:
    """Make the active recording call `call` at this point. Do nothing without a recording."""
    if isinstance(notes := recorders.get(), _Notes):
        notes.add_call(call)


def cannot_record(reason: str) -> None:
    """Refuse the active recording, because the work depends on values it does not see.

    Do nothing without a recording.
    """
    if isinstance(notes := recorders.get(), _Notes):
        notes.refuse(reason)


class _NoValues(TorchFunctionMode):
    """A mode that detects reads of values that bypass the operations of `_Notes`."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func in _READS:
            cannot_record(func.__name__)
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes each launch and each operation of this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch loads its compiler, for a second, to exclude this class."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._steps: list[Callable[[], object] | list[Launch]] = []
        self._kept: list[object] = []
        self._seat_bytes = 0
        self._refused = ""

    def add_call(self, call: Callable[[], object]) -> None:
        self._steps.append(call)

    def refuse(self, reason: str) -> None:
        """Stop noting from here on."""
        self._refused = self._refused or reason

    def add_launch(self, function: int, arguments: bytes, seat_bytes: int) -> None:
        """Implement `LaunchRecorder.add_launch`."""
        launches = self._steps[-1] if self._steps else None
        if not isinstance(launches, list):
            launches = []
            self._steps.append(launches)
        launches.append(Launch(function, arguments))
        self._seat_bytes = max(self._seat_bytes, seat_bytes)

    def keep(self, memory: object) -> None:
        """Implement `LaunchRecorder.keep`."""
        self._kept.append(memory)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if self._refused:
            return func(*args, **kwargs)
        if (kernel := None if kwargs else _kernel_for(func, args)) is not None:
            with self:
                return kernel()
        if func is _ops.empty.memory_format and kwargs.get("dtype") is not None:
            return self._arena.empty(args[0], kwargs["dtype"])
        if func is _ops.empty_like.default and not kwargs and args[0].is_contiguous():
            return self._arena.empty(args[0].shape, args[0].dtype)
        result = func(*args, **kwargs)
        if _depends_on_values(func, args):
            self.refuse(str(func))
        elif func in _ALLOCATIONS:
            self._kept.append(result)
        elif func._schema.is_mutable:  # noqa: SLF001 - torch has no public attribute for it
            self._steps.append(partial(func, *args, **kwargs))
        else:
            self._note_new(func, args, kwargs, result)
        return result

    def _note_new(
        self,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,  # noqa: ANN401
    ) -> None:
        """Note an operation that returns tensors. Views of its arguments need no replay."""
        results = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(each, Tensor) for each in results):
            self.refuse(str(func))
            return
        given = {_storage(tensor) for tensor in _tensors((args, tuple(kwargs.values())))}
        if all(_storage(each) in given for each in results):
            return
        self._kept.extend(results)
        self._steps.append(_again(func, args, kwargs, results))

    def recording(self) -> Recording:
        """Return the recording.

        Raises:
            CannotRecordError: the work was refused.
        """
        if self._refused:
            raise CannotRecordError(self._refused)
        seats = torch.empty(self._seat_bytes, dtype=torch.uint8)
        team = Team()
        return Recording(
            [
                Program(step, seats, team).run if isinstance(step, list) else step
                for step in self._steps
            ],
            [*self._kept, seats],
        )


def _again(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
) -> Callable[[], object]:
    """Return a call that repeats the operation into the tensors that it returned."""
    if func in _COPIES:
        return partial(results[0].copy_, args[0])
    if (into := _into(func)) is not None:
        overload, names = into
        return partial(overload, *args, **kwargs, **dict(zip(names, results, strict=True)))

    def again() -> None:
        made = func(*args, **kwargs)
        for old, new in zip(
            results, made if isinstance(made, list | tuple) else [made], strict=True
        ):
            old.copy_(new)

    return again


@cache
def _into(func: Any) -> tuple[Any, tuple[str, ...]] | None:  # noqa: ANN401
    """Return the overload that writes into existing tensors, with its names for them, or None.

    It saves a new tensor and a copy, which is half of the time of an operation on few rows.
    """
    wanted = [(argument.name, argument.type) for argument in func._schema.arguments]  # noqa: SLF001 - as above
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments  # noqa: SLF001 - as above
        outs = [argument.name for argument in arguments if argument.is_out]
        given = [(argument.name, argument.type) for argument in arguments if not argument.is_out]
        if len(outs) == len(func._schema.returns) and given == wanted:  # noqa: SLF001 - as above
            return overload, tuple(outs)
    return None


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
    """Return whether the result depends on values, or wraps a constant of the current run."""
    if func is _ops.index.Tensor:  # only masks can make the shape of the result depend on values
        return any(tensor.dtype is torch.bool for tensor in _tensors(args[1:]))
    return func is _ops.lift_fresh.default or bool(_UNKNOWN_TAGS.intersection(func.tags))


def _kernel_for(func: Any, args: tuple[Any, ...]) -> Callable[[], Tensor] | None:  # noqa: ANN401
    """Return launches with the same bits as an operation, or None if there are none."""
    team = Team()
    if func is _ops.add.Tensor and _are_rows(*args):
        return lambda: add_rows(args[0], args[1], team)
    if func is _ops.contiguous.default and _are_apart(*args):
        return lambda: copy_rows(args[0], team)
    if func is _ops.cat.default and len(args) == 2 and args[1] in (1, -1) and _are_columns(args[0]):
        return lambda: join_rows(args[0], team)
    if (
        func is _ops.embedding.default
        and len(args) == 2
        and _are_columns(args[:1])
        and args[1].dim() == 1
    ):
        return lambda: gather_rows(args[0], args[1], team)
    if (
        func is _ops.index.Tensor
        and _are_columns(args[:1])
        and len(args[1]) == 1
        and _are_indices(args[1][0])
    ):
        return lambda: gather_rows(args[0], args[1][0], team)
    if (
        func is _ops.argmax.default
        and args[1:] == (-1,)
        and _are_columns(args[:1])
        and (args[0].dtype is torch.float32 and args[0].is_contiguous())
    ):
        return lambda: largest_of_rows(args[0], team)
    return None


def _are_columns(parts: Sequence[Tensor]) -> bool:
    """Return whether all parts are [T, n] of one dtype with kernels, and dense within rows."""
    return all(
        part.dim() == 2
        and part.dtype is parts[0].dtype
        and has_kernels(part.dtype)
        and part.numel()
        and part.stride(1) == 1
        for part in parts
    )


def _are_indices(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.int64 and x.dim() == 1


def _are_rows(first: object, second: object) -> bool:
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype is second.dtype
        and has_kernels(first.dtype)
        and first.is_contiguous()
        and second.is_contiguous()
    )


def _are_apart(x: Tensor) -> bool:
    """Return whether `x` is not contiguous but each of its rows is."""
    return has_kernels(x.dtype) and not x.is_contiguous() and x.dim() > 1 and x[0].is_contiguous()


def _storage(tensor: Tensor) -> int:
    """Return the address of the storage that the tensor is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr()


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
