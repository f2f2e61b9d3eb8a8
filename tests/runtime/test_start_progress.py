import pytest

from runtime.observe.log import LogStyle, styled_line
from runtime.process.start_progress import KERNELS, WEIGHTS, start_progress


@pytest.mark.parametrize("style", list(LogStyle))
@pytest.mark.parametrize(
    ("message", "progress"),
    [
        (KERNELS % (3, 37), "compiles kernels (3 of 37)"),
        (WEIGHTS % (120, 500), "loads weights (120 of 500 MiB)"),
        ("serving with 2 stages", ""),
    ],
)
def test_progress_is_read_from_the_log(style: LogStyle, message: str, progress: str) -> None:
    assert start_progress(styled_line(style, message, role="prefill0")) == progress
