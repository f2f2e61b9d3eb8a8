import pytest

from runtime.observe.log import LogStyle, styled_line
from runtime.process.start_progress import KERNELS, kernel_progress


@pytest.mark.parametrize("style", list(LogStyle))
def test_progress_of_kernels_is_read_from_the_log(style: LogStyle) -> None:
    assert (
        kernel_progress(styled_line(style, KERNELS % (3, 37), role="prefill0"))
        == "compiles kernels (3 of 37)"
    )
    assert not kernel_progress(styled_line(style, "serving with 2 stages", role="prefill0"))
