"""The commands as a person runs them: real processes against an echo router."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from runtime.security.access import ServerSecurity
from runtime.security.certificates import CertificateStore, TlsFiles
from runtime.security.tokens import TokenList
from runtime.version import VERSION
from tests.support.network.authority import DAY, Authority
from tests.support.router.generation import EchoGeneration, serve_echo


@pytest.fixture
def echo() -> EchoGeneration:
    return EchoGeneration()


@pytest.fixture
async def address(echo: EchoGeneration) -> AsyncIterator[str]:
    server, where = await serve_echo(echo)
    yield where
    await server.drain(grace_s=0)


async def baton(
    *arguments: str, stdin: str = "", environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "baton", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "COLUMNS": "160", **environment},
        )

    return await asyncio.to_thread(run)


async def test_generate_streams_text(address: str) -> None:
    done = await baton("generate", "one two", "--target", address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two \n", "")


async def test_a_prompt_may_be_piped_in(echo: EchoGeneration, address: str) -> None:
    for arguments in ((), ("-",)):
        done = await baton("generate", *arguments, "--target", address, stdin="one\ntwo\n")
        assert (done.returncode, done.stdout) == (0, "one two \n")
    assert {request.text for request in echo.requests} == {"one\ntwo"}


async def test_version_is_printed() -> None:
    assert (await baton("--version")).stdout == f"baton {VERSION}\n"


async def test_choices_print_when_complete_and_a_missing_schema_is_one_line(
    address: str,
) -> None:
    done = await baton("generate", "one two", "--n", "2", "--regex", "x", "--target", address)
    assert (done.returncode, done.stdout) == (0, "[0] one two \n")  # the echo knows one choice
    done = await baton("generate", "one", "--json-schema", "/nowhere", "--target", address)
    assert done.returncode == 2
    assert done.stderr.startswith("baton: --json-schema: cannot read /nowhere")
    assert done.stderr.count("\n") == 1


async def test_generate_json_is_one_object_per_event(echo: EchoGeneration, address: str) -> None:
    done = await baton("generate", "4,5", "--ids", "--json", "--no-speculate", "--target", address)
    assert [(request.HasField("speculate"), request.speculate) for request in echo.requests] == [
        (True, False)
    ]
    first, second, finish = map(json.loads, done.stdout.splitlines())
    assert (first["event"], first["token_ids"], second["token_ids"]) == ("chunk", [0], [1])
    assert (finish["event"], finish["reason"], finish["timings"]["prefill_s"]) == (
        "finish",
        "stop",
        0.25,
    )


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "one"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "content": "two", "tool_call_id": "c"},
]


async def test_messages_tools_and_template_arguments_come_from_files_and_flags(
    echo: EchoGeneration, address: str, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    flags = (
        "--target",
        address,
        "--tools",
        str(tmp_path / "tools.json"),
        "--template-argument",
        "enable_thinking=false",
        "--template-argument",
        'mood="sad"',
    )
    done = await baton("generate", "--messages", "-", *flags, stdin=json.dumps(MESSAGES))
    assert (done.returncode, done.stderr) == (0, "")
    done = await baton("chat", *flags, stdin="hello\n")
    assert (done.returncode, done.stdout) == (0, "hello \n")
    asked, said = (request.chat for request in echo.requests)
    assert [message.role for message in asked.messages] == ["user", "assistant", "tool"]
    assert asked.messages[0].content_parts[0].text == "one"
    assert (asked.messages[1].HasField("content"), asked.messages[1].reasoning_content) == (
        False,
        "hm",
    )
    assert (asked.messages[1].tool_calls[0].name, asked.messages[1].tool_calls[0].arguments) == (
        "f",
        '{"a": 1}',
    )
    assert (asked.messages[2].content, asked.messages[2].tool_call_id) == ("two", "c")
    for chat in (asked, said):
        assert list(chat.tools) == ['{"type": "function"}']
        assert json.loads(chat.template_arguments) == {"enable_thinking": False, "mood": "sad"}


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("{}", ("--messages", "-"), "--messages: must be a JSON list of objects"),
        ("[", ("--messages", "-"), "--messages: not JSON"),
        (
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            ("--messages", "-"),
            "message 0 is not in the form of OpenAI's",
        ),
        (
            "[{}]",
            ("--messages", "-"),
            "message 0 is not in the form of OpenAI's API: KeyError('role')",
        ),
        ("", ("--messages", "/nowhere"), "--messages: cannot read /nowhere"),
        ("", ("x", "--tools", "/nowhere"), "--tools: cannot read /nowhere"),
        ("", ("x", "--template-argument", "a"), "--template-argument: must be NAME=JSON, such as"),
        ("", ("x", "--template-argument", "a={"), "--template-argument: must be NAME=JSON"),
        ("", ("x", "--messages", "-"), "--messages excludes a PROMPT"),
    ],
)
async def test_an_invalid_conversation_is_one_line(
    address: str, content: str, flags: tuple[str, ...], says: str
) -> None:
    done = await baton("generate", *flags, "--target", address, stdin=content)
    assert done.returncode != 0
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


async def test_flush_prints_the_pages_each_worker_freed(address: str) -> None:
    done = await baton("flush", "--target", address)
    assert (done.returncode, done.stderr) == (1, ""), "one could not be reached"
    assert done.stdout == "prefill 127.0.0.1:1: 3 pages\ndecode 127.0.0.1:2: away\n"
    done = await baton("flush", "--json", "--target", address)
    assert json.loads(done.stdout.splitlines()[0]) == {
        "role": "prefill",
        "address": "127.0.0.1:1",
        "pages": 3,
        "error": "",
    }


async def test_chat_answers_line_by_line(address: str) -> None:
    done = await baton("chat", "--target", address, stdin="hello\n\nagain\n")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "hello ",
        "hello hello  again ",
    ]  # the echo says the whole history back


async def test_status_shows_workers_and_fails_when_one_does_not_serve(address: str) -> None:
    done = await baton("status", "--target", address)
    assert done.returncode == 1
    for word in ("decode", "warming up", "9/10", "model echo"):
        assert word in done.stdout
    as_json = await baton("status", "--json", "--target", address)
    assert json.loads(as_json.stdout)["workers"][0]["pages_total"] == 10


async def test_a_narrow_terminal_cuts_no_address(address: str) -> None:
    """At 40 columns there was one letter to a line, and numbers ended in dots."""
    wide, narrow = [
        await baton("status", "--target", address, environment={"COLUMNS": columns})
        for columns in ("64", "40")
    ]
    assert "127.0.0.1:1 " in narrow.stdout
    assert narrow.stdout == wide.stdout


async def test_load_reports_figures(address: str) -> None:
    flags = (
        "--target",
        address,
        "--requests",
        "5",
        "--rate",
        "50",
        "--prompt-tokens",
        "4",
        "--output-tokens",
        "2",
    )
    done = await baton("load", *flags, "--json")
    assert done.returncode == 0
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["failed"]) == (5, 0)
    assert figures["ttft_s_p50"] > 0
    assert "goodput" in (await baton("load", *flags)).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("generate", "x", "--target", "127.0.0.1:1"),
            1,
            "connection refused; `baton up` starts a cluster",
        ),
        (("generate", "x", "--target", "nowhere"), 2, "HOST:PORT"),
        (("generate", "1,x", "--ids"), 1, "prompt: must be token ids"),
        (
            ("status", "--target", "127.0.0.1:1"),
            1,
            "connection refused; `baton up` starts a cluster",
        ),
        (("up", "--model", "/absent"), 2, "/absent does not exist; --model takes the folder"),
        (("up", "--model", "Qwen/Qwen3-0.6B"), 2, "hf download Qwen/Qwen3-0.6B"),
        (
            ("up", "--decode-partition", "3,5"),
            2,
            "--decode-partition 3,5 is for 2 stages, and --decode-pp is 1",
        ),
        (("up", "--config", "/absent.toml"), 2, "cannot read /absent.toml"),
        (("up", "--max-contxt", "5"), 2, "Possible options: --max-context"),
        (("up", "--decode", "0"), 2, "--decode must be from 1 to 64"),
        (("generate", "x", "--timeout", "0"), 2, "greater than or equal to 0.001"),
        (("generate", "x", "--max-tokens", "-1"), 1, "baton: stop.max_tokens: must be from 0"),
        (("generate", "x", "--bogus"), 2, "No such option: --bogus"),
        (("fly",), 2, "No such command 'fly'"),
    ],
)
async def test_failures_are_one_clear_line(
    arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = await baton(*arguments)
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


async def test_server_side_refusals_reach_the_terminal(address: str) -> None:
    done = await baton("generate", "x", "--temperature", "-1", "--target", address)
    assert (done.returncode, done.stderr) == (
        1,
        "baton: sampling.temperature: must be from 0 to 100, got -1\n",
    )
    late = await baton("generate", "hang", "--timeout", "0.5", "--target", address)
    assert late.returncode == 1
    assert late.stdout in ("hang ", ""), "what came in time"
    assert "Deadline" in late.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "one two", "--target", "{}"),
        ("generate", "one", "--json", "--target", "{}"),
        ("status", "--target", "{}"),
        ("up", "--listen", "127.0.0.1:0"),
        ("demo",),
        ("--help",),
        ("simulate", "--help"),
        ("check", "--help"),
    ],
)
async def test_a_full_disk_is_one_clear_line(address: str, arguments: tuple[str, ...]) -> None:
    def run() -> subprocess.CompletedProcess[bytes]:
        with Path("/dev/full").open("w") as full:
            return subprocess.run(
                [sys.executable, "-m", "baton", *(word.format(address) for word in arguments)],
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=240,
                check=False,
            )

    done = await asyncio.to_thread(run)
    assert done.returncode == 1
    name = (
        f"baton {arguments[0]}" if arguments[0] in ("up", "demo", "simulate", "check") else "baton"
    )
    assert done.stderr.decode() == f"{name}: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "command", [[str(Path(sys.executable).with_name("baton"))], [sys.executable, "-m", "baton"]]
)
async def test_both_ways_in_work(address: str, command: list[str]) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "generate", "one two", "--target", address],
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one two \n", b"")


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Restore SIGINT: children inherit that a shell's background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("stage", ["typer.py", "sitecustomize.py"])
def test_an_interrupt_while_it_loads_ends_it_in_silence(tmp_path: Path, stage: str) -> None:
    """Before the commands are there, and while their flags are made of their signatures."""
    waits = 'import time; print("loading", flush=True); time.sleep(60)'
    (tmp_path / stage).write_text(
        waits
        if stage == "typer.py"
        else f"""
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "baton.cli":
            import typer.main
            typer.main.get_group = lambda typer_instance: exec({waits!r})
sys.meta_path.insert(0, Finder())
"""
    )
    with subprocess.Popen(
        [sys.executable, "-m", "baton", "status"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"loading\n"
        child.send_signal(signal.SIGINT)
        assert (child.wait(240), child.stderr.read()) == (-signal.SIGINT, b"")


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("command", ["check", "simulate", "plan", "router", "decode"])
def test_an_interrupt_while_a_program_loads_ends_it_in_silence(
    tmp_path: Path, command: str
) -> None:
    """Its imports take seconds, and were shown in a traceback."""
    (tmp_path / "numpy.py").write_text('import time; print("loading", flush=True); time.sleep(60)')
    (tmp_path / "torch.py").symlink_to(tmp_path / "numpy.py")
    (tmp_path / "typer.py").write_text("from numpy import *") if command == "decode" else None
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "baton.program",
            {"check": "pool.check", "simulate": "sim", "plan": "sim.plan"}.get(command, command),
            "--help",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"loading\n"
        child.send_signal(signal.SIGINT)
        assert (child.wait(240), child.stderr.read()) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("command", ["up", "router"])
def test_a_working_directory_that_was_removed_is_one_line(tmp_path: Path, command: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        [
            "bash",
            "-c",
            'cd "$0" && rmdir "$0" && exec "$@"',
            str(gone),
            sys.executable,
            "-P",
            "-m",
            "baton",
            command,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert (done.returncode, done.stderr) == (2, "baton: the working directory is gone\n")


@pytest.mark.parametrize("command", ["up", "demo", "generate", "chat", "status", "load"])
async def test_every_command_explains_itself(command: str) -> None:
    done = await baton(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 4


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
async def test_roles_print_their_own_help(role: str) -> None:
    done = await baton(role, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")
    assert "--announce" in done.stdout


async def test_the_list_of_commands_has_their_whole_summaries() -> None:
    done = await baton("--help", environment={"COLUMNS": "80"})
    _, _, commands = done.stdout.partition("Commands:")
    assert "  load      Measure how a cluster performs under load.\n" in commands
    assert "..." not in commands


async def test_a_secured_server_is_reached_with_flags_or_variables(tmp_path: Path) -> None:
    authority, tokens = Authority(), tmp_path / "tokens"
    tokens.write_text("the-token-of-this-test\n")
    files = authority.files(tmp_path / "server", "router")
    security = ServerSecurity(CertificateStore(files), tokens=TokenList(tokens))
    server, address = await serve_echo(EchoGeneration(), security=security)
    own = authority.files(tmp_path / "client", "client")
    certificate = ("--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
    done = await baton(
        "generate", "one two", "--target", address, *certificate, "--token-file", str(tokens)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two \n", "")
    by_variables = {
        "BATON_TLS_CA": str(own.ca),
        "BATON_TLS_CERT": str(own.cert),
        "BATON_TLS_KEY": str(own.key),
        "BATON_TLS_NAME": "router",
        "BATON_TOKEN_FILE": str(tokens),
    }
    done = await baton("status", "--json", "--target", address, environment=by_variables)
    assert json.loads(done.stdout)["model"] == "echo"
    done = await baton("generate", "one two", "--target", address, *certificate)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no token" in done.stderr
    assert done.stderr.endswith("; pass one with --token-file FILE (or BATON_TOKEN_FILE)\n")
    for command in ("generate", "status"):
        done = await baton(
            command, *(["one"] if command == "generate" else []), "--target", address
        )
        assert done.stderr.endswith(f"; {address} uses TLS: pass --tls-ca FILE (or BATON_TLS_CA)\n")
    await server.drain(grace_s=0)


async def test_a_failed_handshake_names_its_check(tmp_path: Path) -> None:
    """The router's certificate is of another authority or name, or the client's is missing, of
    another authority or expired."""
    authority, stranger = Authority(), Authority("another authority")
    security = ServerSecurity(authority.store(tmp_path / "server", "router"))
    server, address = await serve_echo(EchoGeneration(), security=security)
    own = authority.files(tmp_path / "client", "client")
    foreign = stranger.files(tmp_path / "foreign", "client")
    expired = authority.files(tmp_path / "expired", "client", lifetime=(-2 * DAY, -DAY))

    async def reason(*flags: object) -> str:
        done = await baton("status", "--target", address, *map(str, flags))
        assert done.returncode == 1
        return done.stderr.rpartition("; ")[2].strip()

    def presented(files: TlsFiles) -> tuple[object, ...]:
        return ("--tls-cert", files.cert, "--tls-key", files.key)

    refused = f"the certificate of {address} was not accepted: "
    assert (await reason("--tls-ca", foreign.ca, *presented(own))).startswith(refused)
    wrong_name = await reason("--tls-ca", own.ca, *presented(own), "--tls-name", "prefill")
    assert wrong_name.startswith(f"{refused}Hostname mismatch")
    assert await reason("--tls-ca", own.ca) == (
        f"{address} accepts only clients with a certificate: pass --tls-cert FILE and "
        "--tls-key FILE (or BATON_TLS_CERT, BATON_TLS_KEY)"
    )
    for files in (foreign, expired):
        assert (await reason("--tls-ca", own.ca, *presented(files))).startswith(
            f"{address} did not accept this client's certificate: "
        )
    await server.drain(grace_s=0)


async def test_a_plaintext_server_differs_from_an_unreachable_one(
    tmp_path: Path, address: str
) -> None:
    ca = Authority().files(tmp_path / "client", "client").ca
    done = await baton("status", "--target", address, "--tls-ca", str(ca))
    assert done.stderr.endswith(
        f"; {address} does not use TLS: remove --tls-ca (and BATON_TLS_CA)\n"
    )
    done = await baton("status", "--target", "127.0.0.1:1", "--tls-ca", str(ca))
    assert "TLS:" not in done.stderr
