"""`python -m bench.storm.child CONTROL MODULE ARG...`: become a role with damageable bytes and
clock.

The product has no switch for this. The damaged parts are replaced here, in the process, before its
module runs. gRPC must read the true wall clock, because its C core compares these times with it.
"""

import runpy
import sys
import time
from pathlib import Path
from types import ModuleType

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from bench.storm.control import Control
from runtime.errors import InternalError


def damaged(buffer: bytes | bytearray | memoryview) -> memoryview:
    """Return a copy with one bit in the middle changed."""
    copy = bytearray(buffer)
    if not copy:
        raise InternalError("there is nothing to damage")
    copy[len(copy) // 2] ^= 1 << 4
    return memoryview(copy)


def shift_clock(control: Control) -> None:
    """Shift `time.time` by the control's offset from now on, for all callers except gRPC."""
    true_time = time.time
    true_clock = ModuleType("time")
    vars(true_clock).update(vars(time))
    vars(cygrpc)["time"] = true_clock

    def shifted() -> float:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - nothing else says who asks
        return true_time() + (0.0 if caller.startswith("grpc") else control.clock_shift_s)

    time.time = shifted


def damage_messages(control: Control) -> None:
    """Damage items of handoffs and frames between stages after they are authenticated."""
    from engine.memory.layout import Buffer
    from transfer.transport.protocol import Operation, Peer
    from transfer.ucx import stage_channel as channel_module
    from transfer.ucx import transport as transport_module

    class DamagedItems(transport_module.UcxTransport):
        """Transport whose sender digests the true bytes and sends damaged ones."""

        def send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
            if not isinstance(buffer, memoryview) or not control.takes_item():
                return super().send(peer, tag, buffer)
            operation = super().send(peer, tag, damaged(buffer))
            operation.content = buffer
            return operation

    class DamagedFrames(channel_module.UcxStageChannel):
        def put(
            self, rank: int, tag: int, frame: bytearray, *, deadline_s: float, timeout_s: float
        ) -> None:
            sent = bytearray(damaged(frame)) if control.takes_frame() else frame
            super().put(rank, tag, sent, deadline_s=deadline_s, timeout_s=timeout_s)

    transport_module.UcxTransport = DamagedItems  # type: ignore[misc]
    channel_module.UcxStageChannel = DamagedFrames  # type: ignore[misc]


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    control = Control.open(Path(path))
    shift_clock(control)
    if module != "router":
        damage_messages(control)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
