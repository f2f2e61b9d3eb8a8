"""`python -m baton.program MODULE ARG...`: run a module like `python -m MODULE`, with a silent
Ctrl-C.

A Ctrl-C during loading ends the process without a traceback. A module with an orderly shutdown
handles the signal from then on.
"""

import runpy
import signal
import sys


def main() -> None:
    """Run the module that the command line names."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # a shell's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
