"""Work on the host as a recording: the kernels that it launched, and the operations of torch between them.

A recorded function reads and writes the memory that it had when it was recorded, runs no Python of its own and decides
nothing. So whatever it decided on, shapes and lengths, must be the same when it runs again; what differs between two
runs lies in tensors that are filled anew before (`refill`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any
from weakref import finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.host.compiled import Team, has_kernels, recorders
from engine.kernels.host.program import Launch, Program
from engine.kernels.host.rows import add_rows, copy_rows
from engine.memory.layout import NULL_INDEX

_ops = torch.ops.aten
_ALLOCATIONS = {_ops.empty.memory_format, _ops.empty_like.default, _ops.new_empty.default, _ops.empty_strided.default}
_COPIES = {_ops.to.dtype, _ops.contiguous.default, _ops.clone.default}  # at most to another type
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_ALIGNED_TO = 64  # bytes: a cache line
_CHUNK_BYTES = 4 << 20
_UNKNOWN_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class CannotRecordError(Exception):
    """What a function did depends on values, or is no operation on tensors; the message names the operation."""


class OtherShapeError(Exception):
    """What a step is given is not what it was recorded with; the message has both."""


class Recording:
    """What a function did, to be done again by `replay`."""

    def __init__(self, steps: Sequence[Callable[[], object]], kept: Sequence[Tensor]) -> None:
        self._steps, self._kept = steps, kept

    @property
    def num_steps(self) -> int:
        """Calls out of Python, each of which may be many launches."""
        return len(self._steps)

    def replay(self) -> None:
        """Raises InternalError: a kernel did not do all of its work."""
        for step in self._steps:
            step()


class Arena:
    """Memory of recordings that are never replayed at the same time: what one leaves in it, another overwrites. Within
    a recording memory is used again once no tensor needs it: launches come in the same order in each replay."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self.begin()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._chunks))

    def begin(self) -> None:
        """A new recording, which may use all of it."""
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._rests = list(self._chunks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As torch.empty."""
        wanted = math.prod(shape) * dtype.itemsize
        size = -(-max(wanted, 1) // _ALIGNED_TO) * _ALIGNED_TO
        free = self._free[size]
        block = free.pop() if free else self._taken(size)
        lent = block[:wanted]  # by its array's life, which a tensor over the array and all its views prolong
        finalize(lent, free.append, block)
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _taken(self, size: int) -> np.ndarray:
        """From the first chunk that has so much left."""
        place = next((place for place, rest in enumerate(self._rests) if len(rest) >= size), None)
        if place is None:
            num_bytes = max(size, _CHUNK_BYTES)
            chunk = np.empty(num_bytes + _ALIGNED_TO, np.uint8)
            chunk = chunk[-chunk.ctypes.data % _ALIGNED_TO:][:num_bytes]
            place = len(self._chunks)
            self._chunks.append(chunk)
            self._rests.append(chunk)
        rest = self._rests[place]
        self._rests[place] = rest[size:]
        return rest[:size]


def record(function: Callable[[], object], arena: Arena) -> Recording:
    """Run the function once, for good, and note what it does.

    Raises:
        CannotRecordError: it does what cannot be recorded; what it has done by then is done.
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


class _NoValues(TorchFunctionMode):
    """Refuses what reads values without an operation that `_Notes` sees."""

    def __torch_function__(self, func: Any, types: object, args: tuple[Any, ...] = (),  # noqa: ANN401
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        if func in _READS:
            raise CannotRecordError(func.__name__)
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each launch and each operation of this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler, for a second, to keep it away from this class."""
        return False

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena
        self._steps: list[Callable[[], object] | list[Launch]] = []
        self._kept: list[Tensor] = []
        self._seat_bytes = 0

    def add_launch(self, function: int, arguments: bytes, seat_bytes: int) -> None:
        """See `LaunchRecorder`."""
        launches = self._steps[-1] if self._steps else None
        if not isinstance(launches, list):
            launches = []
            self._steps.append(launches)
        launches.append(Launch(function, arguments))
        self._seat_bytes = max(self._seat_bytes, seat_bytes)

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (),  # noqa: ANN401
                           kwargs: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if func is _ops.add.Tensor and not kwargs and _are_rows(*args):
            with self:
                return add_rows(args[0], args[1], Team())
        if func is _ops.contiguous.default and not kwargs and _are_apart(*args):
            with self:
                return copy_rows(args[0], Team())
        if func is _ops.empty.memory_format and kwargs.get("dtype") is not None:
            return self._arena.empty(args[0], kwargs["dtype"])
        if func is _ops.empty_like.default and not kwargs and args[0].is_contiguous():
            return self._arena.empty(args[0].shape, args[0].dtype)
        if _depends_on_values(func, args):
            raise CannotRecordError(str(func))
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            self._kept.append(result)
        elif func._schema.is_mutable:  # noqa: SLF001 - the only place where torch says so
            self._steps.append(partial(func, *args, **kwargs))
        else:
            self._note_new(func, args, kwargs, result)
        return result

    def _note_new(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:  # noqa: ANN401
        """An operation that gives tensors: nothing to do again where they are views of its arguments."""
        results = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(each, Tensor) for each in results):
            raise CannotRecordError(str(func))
        given = {_storage(tensor) for tensor in _tensors((args, tuple(kwargs.values())))}
        if all(_storage(each) in given for each in results):
            return
        self._kept.extend(results)
        self._steps.append(_again(func, args, kwargs, results))

    def recording(self) -> Recording:
        seats, team = torch.empty(self._seat_bytes, dtype=torch.uint8), Team()
        return Recording([Program(step, seats, team).run if isinstance(step, list) else step for step in self._steps],
                         [*self._kept, seats])


def _again(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],  # noqa: ANN401
           results: Sequence[Tensor]) -> Callable[[], object]:
    """The operation once more, into the tensors that it gave."""
    if func in _COPIES:
        return partial(results[0].copy_, args[0])
    if (into := _into(func)) is not None:
        overload, names = into
        return partial(overload, *args, **kwargs, **dict(zip(names, results, strict=True)))

    def again() -> None:
        made = func(*args, **kwargs)
        for old, new in zip(results, made if isinstance(made, list | tuple) else [made], strict=True):
            old.copy_(new)

    return again


@cache
def _into(func: Any) -> tuple[Any, tuple[str, ...]] | None:  # noqa: ANN401
    """The same operation into tensors that are there already, and its names for these; None where torch has none. It
    saves a new tensor and a copy, half of the time of an operation on few rows."""
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
    """Or makes a tensor of what is no tensor, which would stay what it is now."""
    if func is _ops.index.Tensor:  # the shape of its result may depend on masks only
        return any(tensor.dtype is torch.bool for tensor in _tensors(args[1:]))
    return func is _ops.lift_fresh.default or bool(_UNKNOWN_TAGS.intersection(func.tags))


def _are_rows(first: object, second: object) -> bool:
    return (isinstance(first, Tensor) and isinstance(second, Tensor) and first.shape == second.shape
            and first.dtype is second.dtype and has_kernels(first.dtype) and first.is_contiguous()
            and second.is_contiguous())


def _are_apart(x: Tensor) -> bool:
    """Rows that are dense, each by itself."""
    return has_kernels(x.dtype) and not x.is_contiguous() and x.dim() > 1 and x[0].is_contiguous()


def _storage(tensor: Tensor) -> int:
    """The address of what it is a view of."""
    storage = tensor.untyped_storage()
    return storage.data_ptr()


def _tensors(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors(value)] if isinstance(values, list | tuple) else []


def with_room(page_tables: Tensor) -> Tensor:
    """page_tables: [R, P]. A copy for up to twice as many pages of a row, the further ones the null page."""
    width = page_tables.shape[1]
    return F.pad(page_tables, (0, (1 << width.bit_length()) - width), value=NULL_INDEX)


def refill(kept: object, new: object) -> None:
    """Give kept tensors, alone or in dataclasses and dictionaries, the values of new ones, of which tables may be
    narrower; everything else must be the same.

    Raises:
        OtherShapeError: it is not. What came before it is filled.
    """
    if isinstance(kept, Tensor):
        if not isinstance(new, Tensor) or not _are_alike(kept, new):
            raise OtherShapeError(f"it was recorded with {_described(kept)}, and is given {_described(new)}")
        (kept if kept.shape == new.shape else kept[:, :new.shape[1]]).copy_(new)
    elif type(kept) is type(new) and is_dataclass(kept):
        for field in fields(kept):
            refill(getattr(kept, field.name), getattr(new, field.name))
    elif isinstance(kept, dict) and isinstance(new, dict) and kept.keys() == new.keys():
        for name, value in kept.items():
            refill(value, new[name])
    elif kept != new:
        raise OtherShapeError(f"it was recorded with {_described(kept)}, and is given {_described(new)}")


def _are_alike(kept: Tensor, new: Tensor) -> bool:
    """Of one type and shape, or tables of as many rows, the new one not wider."""
    is_table = kept.dtype is torch.int32 and kept.dim() == new.dim() == 2
    return kept.dtype is new.dtype and (
        kept.shape == new.shape or (is_table and len(kept) == len(new) and kept.shape[1] > new.shape[1]))


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
