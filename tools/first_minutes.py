"""Recorder of a new user's first session in two terminals.

    python -m tools.first_minutes                  write docs/first-minutes.md again

Shells, commands and the cluster are real. A test plays the session again and compares it
(`tests/cluster/test_first_minutes.py`). Values that differ between runs (times, ports, rates) are
normalized for the comparison.
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
START_S = 180
ANSWER_S = 120
_HEAD = """\
# The first ten minutes

<!-- Recorded by `python -m tools.first_minutes`; a test plays it again. -->

Run these commands in a checkout, after `make venv` and `. .venv/bin/activate`. Your input
follows a `$` or, in a chat, a `>`.
"""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\x07]")


@dataclass(frozen=True)
class Scene:
    """Output of one terminal for one or more commands."""

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
        """Type a command, wait for its end and return the output."""
        self.type(command)
        return self.until(PROMPT, typed=command, shown_as=shown_as)

    def type(self, text: str) -> None:
        self._shell.sendline(text)

    def interrupt(self) -> None:
        self._shell.sendintr()

    def until(
        self, word: str, *, typed: str = "", shown_as: str = "", timeout_s: float = ANSWER_S
    ) -> str:
        """Return the output up to `word`, without it."""
        self._shell.expect_exact(word, timeout=timeout_s)
        text = _ESCAPES.sub("", self._shell.before or "")
        if typed:
            text = text.replace(typed, f"{PROMPT}{shown_as or typed}", 1)
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    def close(self) -> None:
        """End the shell and the processes that run in it."""
        self._shell.kill(signal.SIGHUP)
        self._shell.close(force=True)


def play() -> list[Scene]:
    """Return all scenes in order.

    The router listens on a free port, because the default one may be taken on this machine. The
    scenes show the default one. Raises pexpect.ExceptionPexpect if a terminal does not show the
    expected output in time.
    """
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
                "Send a request from a second terminal",
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
        scenes.append(Scene("Chat", _talk(second)))
        scenes.append(Scene("Inspect the cluster", second.run("baton status")))
        scenes.append(
            Scene(
                "Invalid input",
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
                "Stop the cluster with Ctrl-C in the first terminal",
                first.until(PROMPT, timeout_s=START_S),
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
    """Normalize values that differ between runs: times, addresses, ports, the path of the checkout,
    spaces and rules."""
    text = re.sub(r"\d\d:\d\d:\d\d\.\d{3}", "HH:MM:SS", text)
    text = re.sub(r"127\.0\.0\.1:\d+( --target)?|port \d+| --target", "ADDRESS", text)
    text = re.sub(r"\S*/demo/model", "demo/model", text)
    text = re.sub(r"\S*/baton-\w+/", "FOLDER/", text)
    text = re.sub(r"ADDRESS(?= )|[ ─\n]+", " ", text)
    return re.sub(r"( ADDRESS)+", " ADDRESS", text)


def page(scenes: list[Scene]) -> str:
    """Return the documentation page."""
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
    first = Terminal(environment)
    second = Terminal(environment)
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
