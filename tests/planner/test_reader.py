"""The view of a fleet from statuses of several routers."""

from baton.values import ClusterStatus, WorkerStatus
from planner.fleet_view import BOTH, ONLY_DECODE
from planner.reader import FleetReader


def worker(role: str, address: str = "a:1", **values: object) -> WorkerStatus:
    given = {
        "able_roles": ("prefill", "decode"),
        "roles": ("prefill", "decode"),
        "pages_total": 100,
        "pages_free": 100,
        "serving": True,
        **values,
    }
    empty = {
        "reason": "",
        "incarnation": "i",
        "stages": ("0-8",),
        "queued_requests": 0,
        "running_requests": 0,
        "slots_total": 0,
        "slots_free": 0,
        "open_sessions": 0,
    }
    return WorkerStatus(role=role, address=address, **{**empty, **given})  # type: ignore[arg-type]


def status(
    *workers: WorkerStatus, waiting: int = 0, tokens: int = 0, admitted: int = 0
) -> ClusterStatus:
    return ClusterStatus("m", waiting, 1, workers, tokens, admitted)


def test_a_worker_is_listed_once() -> None:
    """Two routers list each of its roles."""
    seen = [
        status(
            worker("prefill", queued_tokens=70, prompt_tokens=5, prompt_tokens_per_s=speed),
            worker(
                "decode",
                running_requests=9,
                queued_requests=1,
                open_sessions=3,
                pages_free=40,
                max_batch_requests=16,
                token_s=speed / 1000,
                output_tokens=8,
            ),
            waiting=2,
            tokens=30,
        )
        for speed in (10.0, 20.0)
    ]
    view = FleetReader().read(1.0, {"x": seen[0], "y": seen[1]})
    (found,) = view.workers
    assert (found.able, found.active) == (BOTH, BOTH)
    assert (found.queued_tokens, found.prompt_rate, found.num_prompt_tokens) == (70, 20.0, 5)
    assert (found.running, found.landing, found.most_running) == (7, 3, 16)
    assert (found.pages_used, found.token_s, found.num_output_tokens) == (0.6, 0.02, 8)
    assert (view.waiting_requests, view.waiting_tokens, view.num_present) == (4, 60, 6)


def test_a_switched_worker_has_its_present_roles() -> None:
    off = worker("prefill", serving=False, reason="it was switched to decode", roles=("decode",))
    view = FleetReader().read(1.0, {"x": status(off, worker("decode", roles=("decode",)))})
    assert view.workers[0].active == ONLY_DECODE
    assert view.workers[0].is_serving


def test_workers_that_leave_or_are_unknown_are_left_out() -> None:
    leaving = worker("prefill", "a:1", serving=False, reason="draining")
    unknown = worker("prefill", "b:1", serving=False, reason="not reached yet", able_roles=())
    lost = worker("decode", "c:1", serving=False, reason="cannot be reached: refused")
    view = FleetReader().read(1.0, {"x": status(leaving, unknown, lost)})
    assert [(each.address, each.is_serving) for each in view.workers] == [("c:1", False)]


def test_a_router_that_comes_back_adds_no_old_arrivals() -> None:
    reader = FleetReader()
    assert reader.read(1.0, {"x": status(admitted=5), "y": status(admitted=100)}).num_arrived == 0
    assert reader.read(2.0, {"x": status(admitted=8)}).num_arrived == 3
    assert reader.read(3.0, {"x": status(admitted=8), "y": status(admitted=500)}).num_arrived == 3
    assert reader.read(4.0, {"x": status(admitted=2), "y": status(admitted=501)}).num_arrived == 4
