"""`python -m router`: one router process."""

from runtime.process.quiet import quiet_grpc


def main() -> None:
    """The entry point."""
    quiet_grpc()
    from router.command import app  # loads grpc

    app(prog_name="baton router")


if __name__ == "__main__":
    main()
