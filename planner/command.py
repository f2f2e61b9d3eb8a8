"""The command line of the planner."""

from pathlib import Path

import typer

from planner.config import PlannerConfig
from planner.service import serve
from runtime.config import load
from runtime.config_flags import Flags, flags_of
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure, report_end
from runtime.process.supervision import EXIT_CONFIG, run_process

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    help="Switch the roles of workers to fit the load, and export how saturated roles are."
)
@flags_of(PlannerConfig, section="planner")
def planner(flags: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
    """Run the planner until it is told to stop."""
    style = flags["log_style"]
    if style is LogStyle.JSON:  # before the settings are read, so that their errors are JSON, too
        configure(level="info", style=LogStyle.JSON, role="planner")
    try:
        settings = load(PlannerConfig, section="planner", flags=flags, file=file)
        configure(level=settings.log_level, style=settings.log_style, role="planner")
        settings.check()
    except ConfigError as error:
        report_end(f"planner: {error}")
        raise typer.Exit(EXIT_CONFIG) from None
    if checks_only:
        raise typer.Exit
    raise typer.Exit(run_process("planner", lambda stop: serve(settings, stop)))
