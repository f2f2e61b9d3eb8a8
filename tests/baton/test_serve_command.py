"""`baton serve`: what it makes of its argument, and models of a Hub."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import app
from baton.cluster_config import demo_model
from baton.hub import is_hub_name
from baton.serve_command import ServeConfig
from runtime.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "README.md": b"unwanted",
    "original/consolidated.safetensors": b"unwanted",
    "model.gguf": b"unwanted",
}


class Hub:
    """Files of one model, in the parts of the Hub's API that a download uses."""

    def __init__(self) -> None:
        self.status = 200
        self.error = ""
        self.asked: list[str] = []

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        if self.status != 200:
            return self.status, {"X-Error-Code": self.error}, b"{}"
        if path.startswith("/api/models/owner/model/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            return (
                200,
                {},
                json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode(),
            )
        if path.startswith("/api/models/owner/model/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in FILES.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        name = path.removeprefix(f"/owner/model/resolve/{COMMIT}/")
        if name in FILES:
            return 200, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, FILES[name]
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"


@contextmanager
def running(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    found = Hub()
    with running(found) as url:
        for name, value in (("ENDPOINT", url), ("HF_HUB_CACHE", str(tmp_path / "hub"))):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield found


def test_a_name_on_the_hub_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    up = ServeConfig(model="owner/model").up()
    assert {path.name: path.read_bytes() for path in up.model.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }
    assert up.model_name == "owner/model"
    hub.status, hub.asked = 500, []
    assert ServeConfig(model="owner/model").up().model == up.model, "from the cache"
    assert not [path for path in hub.asked if "resolve" in path]


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (403, "GatedRepo", "its access is restricted: accept its terms at"),
        (404, "RepoNotFound", "has no such model, or it is private"),
        (404, "RevisionNotFound", "has no revision 'v9' of it"),
        (500, "", "cannot be reached|refused"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, status: int, error: str, said: str) -> None:
    hub.status, hub.error = status, error
    with pytest.raises(ConfigError, match=said) as refused:
        ServeConfig(model="owner/model", revision="v9").up()
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("owner/model is not a folder here.")


def test_without_a_network_the_reason_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 cannot be reached, and it was not"):
        ServeConfig(model="owner/model").up()


def test_folders_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert not is_hub_name("owner/model")
    for name in ("/tmp/x", "./x", "../x/y", "model", "a/b/c", "owner/model.gguf/", ""):
        assert not is_hub_name(name)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    up = ServeConfig(model="owner/model").up()
    assert (up.model, up.model_name) == (Path("owner/model"), "")
    assert ServeConfig().up().model == demo_model()
    with pytest.raises(ConfigError, match="--revision is for models of the Hugging Face Hub"):
        ServeConfig(model="owner/model", revision="main").up()


def test_settings_reach_the_cluster() -> None:
    config = ServeConfig(
        host="0.0.0.0",
        port=80,
        grpc="127.0.0.1:0",
        metrics_port=9100,
        served_model_name=("served", "other"),
        api_key=("0123456789abcdef",),
        memory_mb=256,
        weights="int8",
        aggregated=True,
    )
    cluster = config.up().cluster(None, http_keys=config.api_key)
    assert (cluster.http, cluster.listen, cluster.metrics_port) == (
        "0.0.0.0:80",
        "127.0.0.1:0",
        9100,
    )
    assert (cluster.model_name, cluster.model_alias) == ("served", ("other",))
    assert cluster.worker_flags == ("--weights", "int8")
    assert (cluster.memory_mb, cluster.aggregated) == (256, True)
    assert cluster.http_keys == ("0123456789abcdef",)
    assert cluster.shared_flags[2:4] == ("--model-name", "served")


@pytest.mark.parametrize("key", ["short", "with spaces in the key", "ünprintable-äöü-key"])
def test_a_key_that_cannot_be_presented_is_refused(key: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--api-key", key])
    assert result.exit_code == 2
    assert "--api-key must be at least 16 printable ASCII characters" in result.output
    assert key not in result.output
