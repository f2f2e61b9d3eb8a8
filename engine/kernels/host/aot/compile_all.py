"""`python -m engine.kernels.host.aot.compile_all`: compile every kernel for this CPU, for all
dtypes, on all cores.

Later processes load the compiled kernels. On a fresh checkout or a new node, no process with a
deadline then waits for a compilation.
"""

import argparse
import time

from engine.kernels.host.aot.kernel_list import kernels
from engine.kernels.host.aot.precompile import compile_ahead
from runtime.process.host_cores import num_cores
from runtime.process.start_progress import KERNELS


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    begin_s = time.monotonic()
    compile_ahead(list(kernels()), lambda done, total: print(KERNELS % (done, total), flush=True))
    print(f"all kernels in {time.monotonic() - begin_s:.1f} s on {num_cores()} cores")


if __name__ == "__main__":
    main()
