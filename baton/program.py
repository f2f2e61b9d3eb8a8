"""`python -m baton.program MODULE ARG...`: run a module of ours as `python -m MODULE` would, but
ended in silence by a Ctrl-C that comes while it loads. A module that has something to end in order
handles the signal from then on.
"""

import runpy
import signal
import sys


def main() -> None:
    """Become the module that the command line names."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # a shell's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
