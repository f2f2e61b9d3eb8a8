"""The command line of a router process."""

import gc
from pathlib import Path

import typer

from router.app import serve
from router.config import RouterConfig
from runtime.config import load
from runtime.config_flags import Flags, flags_of
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure, report_end
from runtime.process.supervision import EXIT_CONFIG, run_process

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help="Balance requests over prefill and decode workers and stream tokens to clients.")
@flags_of(RouterConfig, section="router")
def router(flags: Flags, file: Path | None, checks_only: bool) -> None:  # noqa: FBT001
    """Run a router until it is told to stop."""
    style = flags["log_style"]
    if style is LogStyle.JSON:  # before the settings are read, so that their errors are JSON, too
        configure(level="info", style=LogStyle.JSON, role="router")
    try:
        settings = load(RouterConfig, section="router", flags=flags, file=file)
        configure(level=settings.log_level, style=settings.log_style, role="router")
        settings.check()
    except ConfigError as error:
        report_end(f"router: {error}")
        raise typer.Exit(EXIT_CONFIG) from None
    if checks_only:
        raise typer.Exit
    raise typer.Exit(run_process("router", lambda stop: serve(settings, stop, on_start=_settle)))


def _settle() -> None:
    """Exempt the objects that exist now from garbage collection.

    Used in a process that only runs a router: a full collection would hold up every request for 50
    ms.
    """
    gc.collect()
    gc.freeze()
