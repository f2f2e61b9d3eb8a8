"""The first ten minutes of a new user, played in two terminals, are what the page shows."""

import re
from collections.abc import Iterator

import pytest

from baton.client import DEFAULT_TARGET
from tools.first_minutes import PAGE, levelled, play

# Python 3.12 warns of what a pseudo-terminal needs in a process with threads.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")]
_PROCESS_LINE = re.compile(
    r"^(\^C)?((router|prefill|decode)\S* +│|baton +│ .* after \d+ s: ).*\n?", re.MULTILINE
)


def scenes_of(page: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(
        r"^## (.*?)\n\n```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    ):
        yield found[1], comparable(found[2])


def comparable(shown: str) -> str:
    """Return the output without log lines, whose order and number depend on the machine."""
    return levelled(_PROCESS_LINE.sub("", shown.rstrip("\n") + "\n").replace("^C", ""))


def test_output_matches_the_page() -> None:
    played = [(scene.title, comparable(scene.shown)) for scene in play()]
    assert played == list(scenes_of(PAGE.read_text()))


def test_the_page_uses_the_default_router_address_of_the_commands() -> None:
    """It is played at another port, because the usual one may be taken."""
    (shown,) = re.findall(r"router: (\S+), metrics", PAGE.read_text())
    assert shown == DEFAULT_TARGET
