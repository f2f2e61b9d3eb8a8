"""A storm and a partition of real clusters, as they are run by hand, but short; the long ones by
`make test-long`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster_config import demo_model
from tests.support.models.adapters import write_adapter

REFUSED = 77
ROOT = Path(__file__).parents[2]


def figures(module: str, *flags: str, timeout_s: float) -> dict[str, float]:
    """Return the figures of a successful run.

    Faults and failures are printed. Skips if the machine lacks a permission that the run needs.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *flags, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode == REFUSED:
        pytest.skip(done.stderr)
    assert done.stdout, done.stderr
    values: dict[str, float] = json.loads(done.stdout)
    assert done.returncode == 0, f"{values}\n{done.stderr}"
    return values


def assert_bars(values: dict[str, float]) -> None:
    assert {name: values[name] for name in ("wrong", "hung", "leaked", "lost")} == {
        "wrong": 0,
        "hung": 0,
        "leaked": 0,
        "lost": 0,
    }


def test_a_short_storm_of_every_kind_leaks_nothing() -> None:
    """Deadlines are for a machine that others use, too."""
    values = figures(
        "bench.storm",
        "--seconds",
        "14",
        "--seed",
        "7",
        "--rate",
        "5",
        "--kill-every",
        "3",
        "--other-every",
        "1",
        "--timeout",
        "120",
        timeout_s=280,
    )
    assert_bars(values)
    assert values["faults"] >= 9
    assert values["patient"] > 15
    assert values["cached"] > 0


@pytest.mark.long
def test_a_cut_between_two_hosts_is_survived() -> None:
    values = figures(
        "bench.partition",
        "--cuts",
        "both:1",
        "--edges",
        "prefill-decode,stage-stage",
        "--timeout",
        "120",
        timeout_s=280,
    )
    assert (values["cells"], values["failed"], values["leaked"]) == (2, 0, 0)


def test_connecting_to_an_unreachable_host_blocks_no_other() -> None:
    """UCX would wait in connect(2), for two minutes, and the transfer agent's thread with it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.unreachable"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    if done.returncode == REFUSED:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stdout.split()) == (0, ["connected"]), done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_link_between_two_hosts_that_fails_is_remembered() -> None:
    """The first request waits until the link is given up, then moves; the later ones are placed on
    the other pool. Each would try three times without that, and fail."""
    values = figures("tests.bench.severed", timeout_s=800)
    assert values["right"] == values["asked"]
    assert values["retries"] <= 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kill_every", "kills"), [("10", 6), ("5", 11)])
def test_a_storm_with_all_clients_and_faults_loses_nothing(kill_every: str, kills: int) -> None:
    values = figures(
        "bench.storm",
        "--seconds",
        "60",
        "--seed",
        kill_every,
        "--kill-every",
        kill_every,
        "--timeout",
        "120",
        timeout_s=800,
    )
    assert_bars(values)
    assert values["kill_faults"] == kills


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_storm_in_which_an_adapter_changes_mixes_no_versions(tmp_path: Path) -> None:
    for seed in range(3):
        write_adapter(tmp_path / f"adapter-{seed}", demo_model(), seed=seed, lora_alpha=60)
    values = figures(
        "bench.storm",
        "--seconds",
        "45",
        "--seed",
        "3",
        "--kill-every",
        "4",
        "--other-every",
        "1.5",
        "--faults",
        "kill,stop,adapter",
        "--adapters",
        str(tmp_path),
        "--timeout",
        "120",
        timeout_s=800,
    )
    assert_bars(values)
    assert values["adapter_faults"] > 8
    assert 0 < values["changed"] < values["right"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "num_adapters"),
    [("5", 0), ("8", 3), ("11", 3)],
    ids=["data ranks of both roles", "roles apart", "roles mixed"],
)
def test_a_storm_of_a_random_layout_loses_nothing(
    seed: str, num_adapters: int, tmp_path: Path
) -> None:
    """All three have clients with quotas, and requests with all features of the API."""
    for number in range(num_adapters):
        write_adapter(tmp_path / f"adapter-{number}", demo_model(), seed=number, lora_alpha=60)
    values = figures(
        "bench.storm",
        "--random-layout",
        *("--seed", seed, "--seconds", "40", "--rate", "4", "--kill-every", "5"),
        *("--aborts", "0.3", "--timeout", "120"),
        *(("--adapters", str(tmp_path)) if num_adapters else ()),
        timeout_s=800,
    )
    assert_bars(values)
    assert values["unhealthy"] == 0
    assert values["kill_faults"] > 5


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_cuts_within_a_random_layout_lose_nothing() -> None:
    values = figures(
        "bench.partition",
        *("--random-layout", "--seed", "12", "--cells", "4", "--timeout", "120"),
        timeout_s=800,
    )
    assert (values["cells"], values["failed"], values["leaked"]) == (4, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_storm_with_frequent_kills_refuses_what_it_cannot_serve() -> None:
    """The rate is one that two cores serve during so many restarts; by hand the benchmark's own
    rate is used."""
    values = figures(
        "bench.storm",
        "--seconds",
        "45",
        "--seed",
        "2",
        "--kill-every",
        "2",
        "--faults",
        "kill,aborts",
        "--rate",
        "2",
        "--min-right",
        "0.95",
        timeout_s=800,
    )
    assert_bars(values)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_no_cut_of_any_edge_is_noticed_for_longer_than_its_limit() -> None:
    """By hand `python -m bench.partition` cuts every edge both ways and one way, for 1, 5 and
    30 s."""
    values = figures(
        "bench.partition", "--cuts", "there:5,back:5,both:30", "--timeout", "120", timeout_s=1000
    )
    assert (values["cells"], values["failed"], values["leaked"]) == (12, 0, 0)
