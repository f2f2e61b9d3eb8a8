"""`python -m sim`: the program behind `baton simulate`."""

from runtime.log import LogStyle, configure
from sim.command import app


def main() -> None:
    """The entry point. What routers and workers log would fill the terminal."""
    configure(level="error", style=LogStyle.HUMAN, role="simulation")
    app(prog_name="baton simulate")


if __name__ == "__main__":
    main()
