"""The reference pages are what the code gives now."""

import pytest

from tools.reference import PAGES, ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), "run python -m tools.reference"


def test_every_setting_and_flag_says_what_it_means() -> None:
    rows = [line.split(" | ") for line in PAGES["docs/configuration.md"]().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row[0] for row in rows if not row[-1].removesuffix("|").strip()] == []
