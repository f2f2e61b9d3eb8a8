"""`python -m router`: one router process."""

from runtime.process.quiet import quiet_grpc


def main() -> None:
    """Run the router's command line."""
    quiet_grpc()
    from router.command import app  # imports grpc, so only after quiet_grpc()

    app(prog_name="baton router")


if __name__ == "__main__":
    main()
