"""Entry point of `python -m baton` and the `baton` command; loads the rest."""

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from runtime.errors import ConfigError
from runtime.process.quiet import quiet_grpc
from runtime.process.standard_streams import open_to_all_text, whole_output

_STARTING = ("demo", "up")  # commands that start workers
_WITHOUT_FORK_SERVER = ("--no-preload", "--device", "--help")


def main() -> None:
    """Run the command. A Ctrl-C during loading ends the process without a traceback."""
    is_heard = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # a shell's background job ignores it
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_grpc()
    open_to_all_text()
    with ExitStack() as stack:
        fork_server = None
        if needs_fork_server(
            sys.argv[1:]
        ):  # loading it takes longer than this process: start it first
            from baton.fork_server import ForkServer

            try:
                fork_server = stack.enter_context(ForkServer())
            except ConfigError as error:
                sys.exit(_refused(error))
        from typer.main import get_command

        from baton.cli import app

        command = get_command(app)  # also slow to load
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with whole_output("baton"):
            command(obj=fork_server)


def _refused(error: ConfigError) -> int:
    """Print the error in one line; return the exit code."""
    from runtime.process.supervision import EXIT_CONFIG

    print(f"baton: {error}", file=sys.stderr)
    return EXIT_CONFIG


def needs_fork_server(arguments: Sequence[str]) -> bool:
    """Return whether a command line is likely to start workers as forks.

    If the guess is wrong, a fork server is started later, or one is started for nothing.
    """
    return (
        bool(arguments)
        and arguments[0] in _STARTING
        and not any(word.startswith(_WITHOUT_FORK_SERVER) for word in arguments)
    )


if __name__ == "__main__":
    main()
