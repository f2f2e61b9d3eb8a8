"""GGUF files as models of the commands: converted once, with a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from baton.packaged_models import packaged_file
from runtime.model_files.model_folder import gguf_file


def local_checkpoint(path: Path) -> Path:
    """Return the checkpoint of a GGUF file or of a packaged model, which is converted first if it was
    not; any other path as it is.

    Raises:
        ConfigError: the file cannot be converted, or the package of the model is not installed.
    """
    path = packaged_file(path)
    file = gguf_file(path)
    if file is None:
        return path
    # Imported here, because only these files need it.
    from runtime.gguf.convert import checkpoint_of, converted_path

    if (folder := converted_path(file)).is_dir():
        return folder
    with _progress_bar(file) as progress:
        return checkpoint_of(path, progress=progress)


def convert_file(file: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file into a folder, which must not exist.

    Raises:
        ConfigError: the file cannot be converted, or the folder exists.
        OSError: the folder cannot be written.
    """
    from runtime.gguf.convert import convert

    with _progress_bar(file) as progress:
        convert(file, folder, progress)


@contextmanager
def _progress_bar(file: Path) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; yield what moves it, called with bytes done and in all."""
    console = Console(stderr=True, highlight=False)
    console.print(f"converting {file.name}, once", soft_wrap=True)
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
