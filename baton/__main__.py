"""`python -m baton`, and the `baton` command: loads the rest."""

import signal

from runtime.quiet import quiet_grpc


def main() -> None:
    """The entry point. Ctrl-C while the rest still loads ends the process as it ends any other: in silence."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell's background job ignores it
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    quiet_grpc()
    from baton.cli import app

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
