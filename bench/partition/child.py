"""`python -m bench.partition.child HOST MODULE ARG...`: become a role on a `Network` host."""

import runpy
import sys

from tests.support.network.hosts import enter


def main() -> None:
    host, module, *arguments = sys.argv[1:]
    enter(host)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
