"""The reference pages are what the code gives now."""

import pytest

from tools.reference import PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), "run python -m tools.reference"
