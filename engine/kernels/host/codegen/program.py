"""Recorded kernel launches that run again as one call, without Python between them.

A step of few rows has hundreds of launches. The weights have evicted Python's data for a launch
from the caches by the time of the next launch.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    NUM_ITEMS,
    SCRATCH,
    SEATS,
    Team,
    compile_kernel,
    parallel_address,
    record,
)
from runtime.errors import InternalError

_ARGUMENTS = record("launches", "parallel")
_LAUNCH_FIELDS = 3
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class Launch(NamedTuple):
    """The address of a C function, and a copy of the record that it was called with."""

    function: int
    arguments: bytes


class Program:
    """Launches in their order.

    The caller keeps the memory of the addresses in their records. The counts in the records are
    reset at each run.
    """

    def __init__(self, launches: Sequence[Launch], seats: torch.Tensor, team: Team) -> None:
        """Create a program.

        `seats` is memory for the seats of any single launch; the launches use it in turn.
        """
        self._records: list[array[int]] = []
        self._team = team
        self._seats = seats
        num_threads = torch.get_num_threads()
        table = array("q")
        for launch in launches:
            arguments = array(
                "q", launch.arguments.ljust(-(-len(launch.arguments) // 8) * 8, b"\0")
            )
            arguments[SCRATCH] = seats.data_ptr()
            self._records.append(arguments)
            table.extend(
                (
                    launch.function,
                    arguments.buffer_info()[0],
                    min(num_threads, arguments[NUM_ITEMS]),
                )
            )
        self._table, self._num_launches = table, len(launches)
        self._parallel = parallel_address() if num_threads > 1 else 0

    def run(self) -> None:
        """Run all launches.

        Raises:
            InternalError: a kernel did not complete all of its items.
        """
        arguments = array(
            "q", (0, 0, self._num_launches, 0, 0, 0, self._table.buffer_info()[0], self._parallel)
        )
        self._team.run(_runner().address, arguments.buffer_info()[0], num_parts=1)
        if arguments[DONE] != self._num_launches:
            failed = self._records[arguments[DONE]]
            raise InternalError(
                f"kernel {arguments[DONE]} of a recorded step ended after {failed[DONE]} of "
                f"{failed[NUM_ITEMS]} parts"
            )


@cache
def _runner():
    return compile_kernel(_run, _ARGUMENTS, "run_program")


def load_runner() -> None:
    """Compile the kernel that runs programs, or load its cached code."""
    _runner()


def _run(pointer):
    a = carray(pointer, 1)[0]
    launches = carray(_integers_at(a.launches), (a.num_items, _LAUNCH_FIELDS))
    for place in range(a.num_items):
        function, address, num_threads = launches[place]
        arguments = carray(_integers_at(address), SCRATCH)
        arguments[NEXT] = 0
        arguments[DONE] = 0
        arguments[SEATS] = 0
        if num_threads > 1 and a.parallel:
            _call_parallel(a.parallel, function, address, num_threads)
        else:
            _call(function, address)
        if carray(_integers_at(address), SCRATCH)[DONE] != arguments[NUM_ITEMS]:
            return
        carray(pointer, 1)[0].done = place + 1


@intrinsic
def _integers_at(typing, address):
    kind = types.CPointer(types.int64)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64), generate


@intrinsic
def _call(typing, function, address):
    """Call the C function `void (*)(void *)` at an address."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def _call_parallel(typing, parallel, function, address, num_threads):
    """Call the function on `num_threads` threads, by GOMP_parallel at an address."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
        at, function_at, data, threads = arguments
        builder.call(
            builder.inttoptr(at, kind.as_pointer()),
            [function_at, data, builder.trunc(threads, _I32), _I32(0)],
        )
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), generate
