"""A stand-in for CUDA graphs: it runs the captured function again, and fails where a graph would go
wrong in silence.

What is captured may not read values on the host, make tensors of host values or plan; and when it
is replayed it must start exactly what it started then, on the same memory, with the same numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

_READ_ON_THE_HOST = (
    "_local_scalar_dense",
    "lift_fresh",
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "unique",
)


class Plans(Protocol):
    num_plans: int


class CaptureError(RuntimeError):
    """An error like CUDA's for an operation that cannot be captured."""


@dataclass
class Trace:
    """Operations that a function started: names, shapes, plain numbers, and the memory of
    tensors."""

    steps: list[object] = field(default_factory=list)
    _made: dict[int, int] = field(default_factory=dict)

    def add(self, name: str, arguments: object) -> None:
        self.steps.append((name, self._describe(arguments)))

    def made(self, result: object, arguments: object) -> None:
        """Identify memory made meanwhile by its number, because its address may differ next
        time."""
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
        for tensor in _tensors(result):
            place = tensor.untyped_storage().data_ptr()
            if place not in known:
                self._made[place] = len(self.steps)

    def _describe(self, value: object) -> object:
        if isinstance(value, Tensor):
            place = value.untyped_storage().data_ptr()
            memory = ("made", self._made[place]) if place in self._made else ("at", place)
            return (
                *memory,
                value.storage_offset(),
                tuple(value.shape),
                value.stride(),
                value.dtype,
            )
        if isinstance(value, list | tuple):
            return tuple(self._describe(part) for part in value)
        if isinstance(value, dict):
            return tuple((name, self._describe(part)) for name, part in sorted(value.items()))
        return repr(value)  # NaN equals no NaN


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        name = str(func)
        if any(word in name for word in _READ_ON_THE_HOST):
            raise CaptureError(f"{name} cannot be captured: it takes values to or from the host")
        self._trace.add(name, (args, kwargs))
        result = func(*args, **kwargs)
        self._trace.made(result, (args, kwargs))
        return result


@contextmanager
def _watched(trace: Trace) -> Iterator[None]:
    """Record each kernel as one step, without what the interpreter runs inside."""
    run = GridExecutor.__call__

    def launch(self: GridExecutor, *args: object, **kwargs: object) -> None:
        trace.add(
            self.fn.__name__,
            (args, kwargs, tuple(self.grid) if isinstance(self.grid, tuple) else self.grid),
        )
        with _disable_current_modes():
            run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Recorder(trace):
        patch.setattr(GridExecutor, "__call__", launch)
        yield


@dataclass
class Recorded:
    """A recorded function as a `Graph`."""

    name: str
    forward: Callable[[], None]
    planners: Sequence[Plans]
    first: Trace | None = None
    num_replays: int = 0

    def run(self) -> None:
        before = [planner.num_plans for planner in self.planners]
        trace = Trace()
        with _watched(trace):
            self.forward()
        assert before == [planner.num_plans for planner in self.planners], (
            "nothing is planned inside of a graph"
        )
        self.first = self.first or trace
        for then, now in zip(self.first.steps, trace.steps, strict=True):
            assert then == now, "a graph starts what it was captured with"

    def replay(self) -> None:
        self.num_replays += 1
        self.run()


@dataclass
class RecordingCapture:
    """A `Capture`; `planners` must not plan while something is captured or replayed."""

    planners: Sequence[Plans] = ()
    graphs: list[Recorded] = field(default_factory=list)

    def capture(self, name: str, forward: Callable[[], None]) -> Recorded:
        forward()
        graph = Recorded(name, forward, self.planners)
        graph.run()
        self.graphs.append(graph)
        return graph


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return (
        [tensor for part in value.values() for tensor in _tensors(part)]
        if isinstance(value, dict)
        else []
    )
