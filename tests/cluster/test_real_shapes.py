"""Checkpoints in published shapes, served by the command a reader of the quick start types. Weights
are random."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.client import BatonClient
from baton.values import Query, Sampling, Stop
from runtime.process.host_memory import host_memory
from tests.support.models.published import LLAMA_3_1_8B, QWEN3_0_6B, write_published

MIB = 1 << 20


def up(model: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "baton",
        "up",
        "--model",
        str(model),
        "--listen",
        "127.0.0.1:0",
        *flags,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_oversized_requests_are_refused_at_once(tmp_path: Path) -> None:
    """Llama-3.1-8B: as many pools as this machine has no room for."""
    model = write_published(tmp_path / "Llama-3.1-8B", "LlamaConfig", LLAMA_3_1_8B)
    count = 1 + host_memory().available_bytes // (15317 * MIB)
    with up(model, "--decode", str(count)) as child:
        output, error = child.communicate(timeout=120)
    assert (child.returncode, output) == (2, "")
    assert re.fullmatch(
        rf"baton up: {count + 1} pools of Llama-3.1-8B take {count + 1} \* 15317 MiB = \d+ MiB for "
        r"weights alone, and \d+ of \d+ MiB are free on this machine: .*\n",
        error,
    )


@pytest.mark.long
def test_the_smallest_published_shape_is_served_as_it_is(tmp_path: Path) -> None:
    """Qwen3-0.6B without a flag: its whole context or, with a line that says so, a shorter one; ids
    in, ids out."""
    model = write_published(tmp_path / "Qwen3-0.6B", "Qwen3Config", QWEN3_0_6B, has_weights=True)
    with up(model, "--max-context", "4096") as child:
        assert child.stdout is not None
        lines: list[str] = []
        while not any("ready: try" in line for line in lines):
            lines.append(child.stdout.readline())
            assert lines[-1], lines
        said = "".join(lines)
        assert "has no tokenizer.json: texts and chats are rejected" in said
        assert "baton generate --ids 1,2,3 --max-tokens 8 --temperature 0" in said
        address = re.search(r"router: (\S+),", said)
        assert address is not None
        with BatonClient(address[1]) as client:
            assert client.model_info().max_context_tokens == 4096
            query = Query((1, 2, 3), Sampling(temperature=0), Stop(max_tokens=8, ignore_eos=True))
            assert len(client.complete(query, timeout_s=240).token_ids) == 8
        child.terminate()
        child.communicate(timeout=60)
