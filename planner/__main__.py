"""`python -m planner`: the planner of the roles of a fleet's workers."""

from runtime.process.quiet import quiet_grpc


def main() -> None:
    """Run the planner's command line."""
    quiet_grpc()
    from planner.command import app  # imports grpc, so only after quiet_grpc()

    app(prog_name="baton planner")


if __name__ == "__main__":
    main()
