import shutil
import subprocess
from pathlib import Path

import yaml

from baton.scrape import RULES, scrape_config
from runtime.process.announce import Announcement


def test_every_process_is_scraped_under_its_role(tmp_path: Path) -> None:
    def at(address: str, port: int | None) -> Announcement:
        return Announcement(address, port, 1, "x")

    text = scrape_config(
        {
            "router": at("127.0.0.1:7000", 9000),
            "decode-0.0": at("127.0.0.1:7001", 9001),
            "decode-0.1": at("[::1]:7002", 9002),
            "silent-0": at("127.0.0.1:7003", None),
        }
    )
    jobs = {
        job["job_name"]: [(entry["targets"], entry["labels"]) for entry in job["static_configs"]]
        for job in yaml.safe_load(text)["scrape_configs"]
    }
    assert jobs == {
        "router": [(["127.0.0.1:9000"], {"process": "router"})],
        "decode": [
            (["127.0.0.1:9001"], {"process": "decode-0.0"}),
            (["[::1]:9002"], {"process": "decode-0.1"}),
        ],
    }
    assert yaml.safe_load(text)["rule_files"] == [str(RULES)]
    assert "rule_files" not in yaml.safe_load(scrape_config({}, tmp_path / "none.yaml"))
    (tmp_path / "prometheus.yml").write_text(text)
    promtool = shutil.which("promtool")
    assert promtool is not None, "install Prometheus (Debian: prometheus)"
    subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        check=True,
        capture_output=True,
        timeout=60,
    )
