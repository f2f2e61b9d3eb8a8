"""Output of the commands with unusual terminals, pipes and locales, against an echo router."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.baton.test_cli import baton
from tests.support.router.generation import EchoGeneration, serve_echo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server, where = await serve_echo(EchoGeneration())
    yield where
    await server.drain(grace_s=0)


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    [
        ("ascii", ("status", "--target", "{}")),
        ("latin-1", ("status", "--target", "{}")),
        ("cp1252", ("status", "--target", "{}")),
        ("latin-1", ("generate", "na│ve ☃", "--target", "{}")),
        (
            "ascii",
            ("load", "--requests", "2", "--rate", "50", "--prompt-tokens", "4", "--target", "{}"),
        ),
    ],
)
async def test_an_encoding_without_frames_ends_no_command(
    address: str, encoding: str, arguments: tuple[str, ...]
) -> None:
    words = [word.format(address) for word in arguments]
    done = await baton(*words, stdin="hello\n", environment={"PYTHONIOENCODING": encoding})
    assert "Traceback" not in done.stderr
    assert done.stdout.strip()
    assert done.stdout.isascii()


async def test_characters_an_encoding_lacks_are_replaced_or_escaped(address: str) -> None:
    """By hand: U+2502 is a frame, U+2603 a snowman."""
    plain = {"PYTHONIOENCODING": "ascii"}
    done = await baton("generate", "a│b ☃", "--target", address, environment=plain)
    assert done.stdout == "a|b \\u2603 \n"
    done = await baton("status", "--target", address, environment=plain)
    assert "| 0-4 |" in done.stdout or "|| 0-" in done.stdout
    done = await baton("generate", "a│b ☃", "--target", address)
    assert done.stdout == "a│b ☃ \n"


def test_a_file_name_that_is_no_text_ends_no_command(tmp_path: Path) -> None:
    """`check` prints the folder's name to stdout, whose errors are strict in UTF-8 as well."""
    folder = os.fsencode(tmp_path) + b"/model-\xff"
    os.symlink(os.fsencode(ROOT / "demo" / "model"), folder)
    done = subprocess.run(
        [sys.executable, "-m", "baton", "check", folder],
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


async def test_text_is_read_in_any_locale(address: str) -> None:
    """The C locale without Python's own cure for it: ASCII, with bytes it does not know as
    surrogates."""
    bare = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = await baton("generate", "na│ve ☃", "--target", address, environment=bare)
    assert (done.returncode, done.stdout, done.stderr) == (0, "na|ve \\u2603 \n", "")
    for arguments in (("generate",), ("chat",)):
        done = await baton(*arguments, "--target", address, stdin="☃\n", environment=bare)
        assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2603 \n", "")


@pytest.mark.parametrize("arguments", [("generate",), ("chat",), ("generate", b"\xff")])
async def test_bytes_that_are_no_text_are_refused_as_that(
    address: str, arguments: tuple[str | bytes, ...]
) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "baton", *arguments, "--target", address],
        input=b"\xff\n",
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b" is not text: 'utf-8' codec can't decode byte 0xff in position 0" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("generate <&-", "pass a PROMPT, or pipe one in"),
        ("generate </dev/null", "pass a PROMPT, or pipe one in: stdin was empty"),
        ("generate - </dev/null", "pass a PROMPT, or pipe one in: stdin was empty"),
        ("generate ''", "the PROMPT is empty"),
        ("generate --ids ,", "prompt: must be token ids like 1,2,3, got ','"),
        ("chat <&-", "chat needs both stdin and stdout"),
        ("chat </dev/null >&-", "chat needs both stdin and stdout"),
    ],
)
def test_a_prompt_that_is_missing_is_asked_for(command: str, says: str) -> None:
    """Nothing is sent, so nothing needs to listen."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" -m baton {command}', sys.executable],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode != 0, done.stdout, done.stderr) == (True, "", f"baton: {says}\n")


def test_a_wait_for_a_silent_stdin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "baton", "generate"],
        stdin=read_end,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        os.close(read_end)
        assert child.stderr is not None
        assert child.stderr.readline() == (
            "baton: reading the prompt from stdin until that ends (or pass a PROMPT)\n"
        )
        os.close(write_end)
        assert (child.wait(240), child.stderr.read()) == (
            2,
            "baton: pass a PROMPT, or pipe one in: stdin was empty\n",
        )


async def test_a_reader_that_leaves_ends_a_command_without_a_traceback(address: str) -> None:
    for command in (
        f"generate 'one two' --target {address}",
        f"status --target {address}",
        "simulate --requests 2",
    ):
        words = ["bash", "-c", f'"$0" -m baton {command} | true', sys.executable]
        done = await asyncio.to_thread(
            subprocess.run, words, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.stderr == ""


async def test_a_refused_connection_names_two_next_steps() -> None:
    for command in (("status",), ("generate", "x"), ("load", "--requests", "1")):
        done = await baton(*command, "--target", "127.0.0.1:1")
        assert done.returncode == 1
        assert done.stderr.endswith(
            "; `baton up` starts a cluster, --target HOST:PORT (or BATON_TARGET) "
            "selects another router\n"
        )


async def test_commands_ignore_proxies_of_the_environment(
    address: str,
) -> None:
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
        "http://127.0.0.1:9",
    )
    proxies |= dict.fromkeys(("ALL_PROXY", "all_proxy"), "socks5://127.0.0.1:9")
    proxies |= dict.fromkeys(("NO_PROXY", "no_proxy"), "")
    done = await baton("generate", "one two", "--target", address, environment=proxies)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two \n", "")
