"""`baton up` as a user types it, with all of its processes."""

import asyncio
import json
import os
import shlex
import signal
import sys

import httpx2
import pytest

NOWHERE, SOCKS = "http://127.0.0.1:9", "socks5://127.0.0.1:9"
PROXIES = {
    "http_proxy": NOWHERE,
    "HTTP_PROXY": NOWHERE,
    "grpc_proxy": NOWHERE,
    "all_proxy": SOCKS,
    "ALL_PROXY": SOCKS,
    "no_proxy": "",
    "NO_PROXY": "",
}


async def test_up_starts_its_gateway_despite_a_proxy_and_logs_json() -> None:
    """It waited for three minutes for a gateway that it asked by the proxy, or ended in a
    traceback."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        "up",
        "--listen",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--log-style",
        "json",
        "--log-level",
        "debug",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **PROXIES},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    lines: list[bytes] = []
    async with asyncio.timeout(240):
        while b"over HTTP:" not in (line := await child.stdout.readline()):
            assert line, f"it ended: {await child.stderr.read()!r}"
            lines.append(line)
        lines.append(line)
        program, *rest = shlex.split(json.loads(line)["message"].partition("over HTTP:")[2])
        assert (program, rest[:2]) == ("curl", ["--noproxy", "*"])
        url, body = rest[2], rest[-1]
        async with httpx2.AsyncClient(timeout=120, trust_env=False) as http:
            right = await http.post(url, headers={"content-type": "application/json"}, content=body)
            wrong = await http.post(url, headers={"content-type": "application/json"}, content="{")
        assert right.json()["choices"][0]["message"]["content"].startswith(" 3 5 7 9")
        assert wrong.status_code == 400
        child.send_signal(signal.SIGINT)
        out, err = await child.communicate()
    assert child.returncode == 0
    values = [json.loads(line) for line in (*lines, *out.splitlines(), *err.splitlines())]
    named = {each["process"] for each in values if "process" in each}
    assert named == {"baton", "gateway", "router", "prefill-0", "decode-0"}
    assert all("message" in each for each in values)


@pytest.mark.parametrize("key", ["", "the-key-of-this-test"])
async def test_serve_prints_what_works(key: str) -> None:
    """The curl line answers; with keys it takes one from the variable, and is refused without."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton",
        "serve",
        *("--grpc", "127.0.0.1:0", "--port", "0", "--metrics-port", "0"),
        *("--served-model-name", "counter"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **PROXIES, **({"BATON_API_KEY": key} if key else {})},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    page = ""
    try:
        async with asyncio.timeout(240):
            while "over HTTP:" not in (line := (await child.stdout.readline()).decode()):
                assert line, f"it ended: {await child.stderr.read()!r}"
                page = line.partition("status:   ")[2].strip() or page
            words = shlex.split(line.partition("over HTTP:")[2])
            url = next(word for word in words if word.startswith("http://"))
            headers = [words[at + 1] for at, word in enumerate(words) if word == "-H"]
            assert headers[1:] == (["authorization: Bearer $BATON_API_KEY"] if key else [])
            assert json.loads(words[-1])["model"] == "counter"
            async with httpx2.AsyncClient(timeout=120, trust_env=False) as http:
                kind = {"content-type": "application/json"}
                bare = await http.post(url, headers=kind, content=words[-1])
                shown = {**kind, **({"authorization": f"Bearer {key}"} if key else {})}
                right = await http.post(url, headers=shown, content=words[-1])
                health = await http.get(f"{page}health")
            assert bare.status_code == (401 if key else 200)
            assert right.json()["choices"][0]["message"]["content"].startswith(" 3 5 7 9")
            assert health.text == "OK\n"
            child.send_signal(signal.SIGINT)
            await child.communicate()
    finally:
        if child.returncode is None:  # the test failed: leave no cluster behind
            child.terminate()
            await child.wait()
    assert child.returncode == 0
