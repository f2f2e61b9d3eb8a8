"""Reports from simulated workers to routers, as `pool.watch` and `router.workers.watch` exchange
them.

Reports without news are left out. An idle worker that has reported so is not polled again until it
gets a request, and counts as alive until its process dies or is cut off. Its omitted reports would
change nothing in a router. This makes large fleets possible.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from pool.prefix.journal import PointWatcher
from protos import worker_pb2
from router.text.model_facts import ModelLimits
from router.workers.watch import apply_load, apply_report, silence_s_of
from router.workers.worker import Worker
from sim.worker import SimulatedWorker


class Reports:
    """Reports to one router, from any worker by role and address. Each stream starts within its
    first interval.
    """

    def __init__(
        self,
        workers: Mapping[tuple[str, str], SimulatedWorker],
        latency_s: float,
        rng: random.Random,
    ) -> None:
        self._workers = workers
        self._latency_s = latency_s
        self._rng = rng

    async def follow(self, worker: Worker, facts: ModelLimits, interval_s: float) -> str:
        """Apply the reports of a worker. Implements `router.workers.watch.Follow`."""
        worker.caches.forget(worker.address)  # the stream begins with a complete cache report
        watch = _ReportStream(
            worker, facts, self._workers[worker.role, worker.address], interval_s, self._latency_s
        )
        try:
            watch.open(self._rng.random() * interval_s)
            return await watch.ended
        finally:
            watch.close()


class _ReportStream:
    """One stream of reports. `ended` gets the reason of its end."""

    def __init__(
        self,
        reader: Worker,
        facts: ModelLimits,
        worker: SimulatedWorker,
        interval_s: float,
        latency_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._reader = reader
        self._facts = facts
        self._worker = worker
        self._interval_s = interval_s
        self._latency_s = latency_s
        self._scope = ExitStack()
        self._cache: PointWatcher | None = None  # None before the stream has begun
        self._copies: PointWatcher | None = None
        self._incarnation = ""  # of the worker when the stream began
        self._sent = worker_pb2.WorkerLoad()
        self._next_s = 0.0  # when the next report is due, or would be due if it had news
        self._timer: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None

    def open(self, first_s: float) -> None:
        """Start the stream: info and load at once, then loads at intervals offset by `first_s`."""
        self._next_s = self._loop.time() + first_s - self._interval_s
        self._worker.watchers[self] = None
        if self._worker.server.is_cut:
            self.cut()
        elif self._worker.server.is_up:
            self._begin()
        else:
            self._end_later("connection refused")

    def close(self) -> None:
        """End the stream."""
        self._worker.watchers.pop(self, None)
        self._scope.close()
        self._rest()
        if self._silence is not None:
            self._silence.cancel()

    def woken(self) -> None:
        """Resume reports at the next interval if they were paused."""
        if self._timer is None and self._cache is not None and self._silence is None:
            missed = max(0, -int((self._next_s - self._loop.time()) // self._interval_s))
            self._next_s += missed * self._interval_s
            self._timer = self._loop.call_at(self._next_s, self._report)

    def changed(self) -> None:
        """Report at once."""
        if self._cache is not None and self._silence is None:
            self._rest()
            self._report()

    def died(self) -> None:
        """Close the connection; a cut hides that."""
        self._rest()
        if self._silence is None:
            self._end_later("the connection was closed")

    def cut(self) -> None:
        """Stop reports, and start the silence timer."""
        if self._silence is not None:
            return
        self._rest()
        silence_s = silence_s_of(self._interval_s)
        self._silence = self._loop.call_later(
            silence_s, self._end, f"no report for {silence_s:g} s"
        )

    def healed(self) -> None:
        """Report news at once after a cut."""
        if self._silence is None:
            return
        self._silence.cancel()
        self._silence = None
        if not self._worker.server.is_up or self._incarnation not in ("", self._worker.incarnation):
            self._end_later("the connection was closed")
        elif self._cache is None:
            self._begin()
        else:
            self._report()

    def _begin(self) -> None:
        self._incarnation = self._worker.incarnation
        self._cache = self._scope.enter_context(self._worker.journal.watch())
        self._copies = self._scope.enter_context(self._worker.copies.watch())
        self._loop.call_later(
            self._latency_s, self._arrive, [worker_pb2.WatchResponse(info=self._worker.info())]
        )
        self._report()

    def _report(self) -> None:
        """Send a report if there is news, and schedule the next; otherwise pause until `woken`."""
        assert self._cache is not None
        assert self._copies is not None
        worker = self._worker
        news = [worker_pb2.WatchResponse(cache=report) for report in self._cache.take()]
        news += [worker_pb2.WatchResponse(copies=report) for report in self._copies.take()]
        load = worker.load()
        load.cache_reports = self._cache.num_reports
        load.copy_reports = self._copies.num_reports
        self._timer = None
        if news or worker.num_requests or load != self._sent:
            self._sent = load
            self._loop.call_later(self._latency_s, self._loaded, news, load)
            self._next_s += self._interval_s
            self._timer = self._loop.call_at(self._next_s, self._report)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _arrive(self, responses: Sequence[worker_pb2.WatchResponse]) -> None:
        for response in responses:
            if not self.ended.done() and (
                problem := apply_report(self._reader, self._facts, response)
            ):
                self._end(problem)

    def _loaded(
        self, news: Sequence[worker_pb2.WatchResponse], load: worker_pb2.WorkerLoad
    ) -> None:
        """Apply news and a load, which avoids a message around the load."""
        if news:
            self._arrive(news)
        if not self.ended.done() and (problem := apply_load(self._reader, load)):
            self._end(problem)

    def _end_later(self, details: str) -> None:
        self._loop.call_later(self._latency_s, self._end, f"cannot be reached: {details}")

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
