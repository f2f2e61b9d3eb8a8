"""A worker that writes its UCX addresses into a folder, as a scan would find them: FOLDER ROLE,
then its flags."""

import runpy
import sys
from itertools import count
from pathlib import Path

from transfer.ucx.stage_channel import UcxStageChannel
from transfer.ucx.transport import UcxTransport

folder, role = Path(sys.argv.pop(1)), sys.argv.pop(1)
numbers = count()


def telling(made: type[UcxStageChannel] | type[UcxTransport], kind: str) -> None:
    """Patch the class so that each new one writes `KIND-ROLE-RANK-NUMBER`."""
    init = made.__init__
    rank = sys.argv[sys.argv.index("--rank") + 1]

    def begin(self: UcxStageChannel | UcxTransport, **options: object) -> None:
        init(self, **options)  # type: ignore[arg-type]
        path = folder / f"{kind}-{role}-{rank}-{next(numbers)}"
        path.with_suffix(".new").write_text(self.address.hex())
        path.with_suffix(".new").rename(path)

    made.__init__ = begin  # type: ignore[method-assign]


telling(UcxStageChannel, "frames")
telling(UcxTransport, "items")
runpy.run_module(role, run_name="__main__", alter_sys=True)
