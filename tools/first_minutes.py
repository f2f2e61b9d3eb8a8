"""Plays the first ten minutes of a new user in two terminals, and writes down what they show.

    python -m tools.first_minutes                  docs/first-minutes.md anew

Everything is real: shells, the commands as they are typed, a cluster. A test plays it again and
compares (`tests/cluster/test_first_minutes.py`); what differs from run to run (times, ports, rates)
is levelled for that.
"""

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pexpect

from baton.client import DEFAULT_TARGET

PAGE = Path(__file__).parent.parent / "docs" / "first-minutes.md"
PROMPT = "$ "
START_S, ANSWER_S = 180, 120
_HEAD = """\
# The first ten minutes

<!-- Played and written by `python -m tools.first_minutes`; a test plays it again. -->

In a checkout, after `make venv` and `. .venv/bin/activate`. What is typed follows a `$` or, in a conversation, a `>`.
"""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x07]")


@dataclass(frozen=True)
class Scene:
    """What one terminal shows from one command to the next."""

    title: str
    shown: str


class Terminal:
    """A shell in a terminal of 80 columns."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._shell = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile"],
            encoding="utf-8",
            dimensions=(24, 80),
            env={**os.environ, **environment},
            timeout=ANSWER_S,
            echo=True,
        )
        self._shell.expect_exact(PROMPT)

    def run(self, command: str, *, shown_as: str = "") -> str:
        """Type a command and wait until it has ended."""
        self.type(command)
        return self.until(PROMPT, typed=command, shown_as=shown_as)

    def type(self, text: str) -> None:
        self._shell.sendline(text)

    def interrupt(self) -> None:
        self._shell.sendintr()

    def until(
        self, word: str, *, typed: str = "", shown_as: str = "", timeout_s: float = ANSWER_S
    ) -> str:
        """What the terminal shows up to `word`, which is not part of it."""
        self._shell.expect_exact(word, timeout=timeout_s)
        text = _ESCAPES.sub("", self._shell.before or "")
        if typed:
            text = text.replace(typed, f"{PROMPT}{shown_as or typed}", 1)
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    def close(self) -> None:
        """End the shell, and whatever runs in it."""
        self._shell.kill(signal.SIGHUP)
        self._shell.close(force=True)


def play() -> list[Scene]:
    """Return all scenes in order. The router listens where it does for a new user, as far as can be
    seen: on this machine that address may be taken. Raises pexpect.ExceptionPexpect when a terminal
    does not show what it should in time."""
    target = f"127.0.0.1:{_free_port()}"
    with _terminals(target) as (first, second):
        first.type(f"baton up --decode-pp 2 --listen {target}")
        started = (
            first.until(
                "--temperature 0",
                typed=f"baton up --decode-pp 2 --listen {target}",
                shown_as="baton up --decode-pp 2",
                timeout_s=START_S,
            )
            + " --temperature 0"
        )
        scenes = [Scene("Start a cluster", started)]
        first.until("\n")
        scenes.append(
            Scene(
                "Ask it something, in a second terminal",
                "\n".join(
                    [
                        second.run('baton generate --chat "Count from 3 by 2." --temperature 0'),
                        second.run(
                            'echo "Count from 4 by 2." | baton generate --chat --temperature 0'
                        ),
                    ]
                ),
            )
        )
        scenes.append(Scene("Talk to it", _talk(second)))
        scenes.append(Scene("See what it is made of", second.run("baton status")))
        scenes.append(
            Scene(
                "Make a mistake",
                "\n".join(
                    [
                        second.run("baton generate --chat Hello --temperature -1"),
                        second.run("baton up --model Qwen/Qwen3-0.6B"),
                        second.run("baton up --decode-partition 3,5"),
                    ]
                ),
            )
        )
        first.interrupt()
        scenes.append(
            Scene(
                "Stop it with Ctrl-C, in the first terminal", first.until(PROMPT, timeout_s=START_S)
            )
        )
    return [Scene(scene.title, scene.shown.replace(target, DEFAULT_TARGET)) for scene in scenes]


def _talk(terminal: Terminal) -> str:
    terminal.type("baton chat --temperature 0")
    shown = [terminal.until("> ", typed="baton chat --temperature 0")]
    for line in (
        "Near the mill Mona found a red lantern. What did Mona do?",
        "/clear",
        "Count from 2 by 2.",
        "/exit",
    ):
        terminal.type(line)
        end = PROMPT if line == "/exit" else "\n> "
        shown.append("> " + terminal.until(end))
    return "\n".join(shown)


def levelled(text: str) -> str:
    """Without what differs from run to run: times, addresses, ports, the place of the checkout,
    spaces and rules."""
    text = re.sub(r"\d\d:\d\d:\d\d\.\d{3}", "HH:MM:SS", text)
    text = re.sub(r"127\.0\.0\.1:\d+( --target)?|port \d+| --target", "ADDRESS", text)
    text = re.sub(r"\S*/demo/model", "demo/model", text)
    text = re.sub(r"\S*/baton-\w+/", "FOLDER/", text)
    text = re.sub(r"ADDRESS(?= )|[ ─\n]+", " ", text)
    return re.sub(r"( ADDRESS)+", " ADDRESS", text)


def page(scenes: list[Scene]) -> str:
    """The page of the documentation."""
    place = str(PAGE.parent.parent)
    parts = [
        f"## {scene.title}\n\n```console\n{scene.shown.replace(place, '/home/you/baton')}\n```\n"
        for scene in scenes
    ]
    return "\n".join([_HEAD, *parts])


@contextmanager
def _terminals(target: str) -> Iterator[tuple[Terminal, Terminal]]:
    scripts = str(Path(sys.executable).parent)
    environment = {
        "PS1": PROMPT,
        "TERM": "dumb",
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "BATON_TARGET": target,
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
    }
    first, second = Terminal(environment), Terminal(environment)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    PAGE.write_text(page(play()))
