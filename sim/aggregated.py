"""Simulation of aggregated workers, which both prefill and decode. Pure.

It serves for comparison: Baton has no such workers. Each step of a worker generates one token for
every row and prefills up to a chunk of the oldest prompts: chunked prefill, as single engines run
it. A step takes the sum of both times, less the smaller of the two constant parts. Prompts go to
the worker with the fewest tokens to prefill, and their responses stay there. Nothing is
transferred, no prefix is cached, and a request begins when pages for its maximum length are free.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.load import Outcome
from baton.workload import Planned
from runtime.errors import CapacityError
from sim.costs import Costs
from sim.decode_pool import Rounds

END_S = 1e12  # after the end of any run


@dataclass(eq=False)
class _AggregatedRequest:
    """One request on its worker."""

    planned: Planned
    unread: int  # prompt tokens to prefill
    left: int  # tokens to generate
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def context(self) -> int:
        return self.planned.prompt_tokens - self.unread + self.planned.output_tokens - self.left


@dataclass
class _AggregatedWorker:
    """One worker. Times are those of the load."""

    costs: Costs
    now_s: float = 0.0
    unread: int = 0  # tokens to prefill, of all prompts
    _queue: deque[_AggregatedRequest] = field(default_factory=deque)
    _rows: list[_AggregatedRequest] = field(default_factory=list)
    _pages_used: int = 0

    def take(self, handler: _AggregatedRequest) -> None:
        """Queue a request now."""
        self._queue.append(handler)
        self.unread += handler.unread

    def advance(self, until_s: float) -> None:
        """Run the steps that begin before `until_s`."""
        while self.now_s < until_s:
            chunk = self._chunk()
            if chunk:
                self._step(chunk)
            elif self._rows:
                self._decode(until_s)
            else:
                self.now_s = until_s

    def _chunk(self) -> list[tuple[_AggregatedRequest, int]]:
        """Return the next prompts with tokens of each, up to one chunk, and reserve pages for new
        ones.
        """
        found = []
        budget = self.costs.prefill.chunk_tokens
        num_rows = len(self._rows)
        for handler in self._queue:
            begins = handler.unread == handler.planned.prompt_tokens
            num_pages = self._pages(handler) if begins else 0
            if (
                not budget
                or num_rows >= self.costs.decode.max_running
                or self._pages_used + num_pages > self.costs.decode.num_pages
            ):
                break
            self._pages_used += num_pages
            count = min(budget, handler.unread)
            found.append((handler, count))
            budget = budget - count
            num_rows = num_rows + 1
        return found

    def _step(self, chunk: Sequence[tuple[_AggregatedRequest, int]]) -> None:
        prefill = self.costs.prefill
        decode = self.costs.decode
        pairs = sum(count * (handler.context + (count + 1) / 2) for handler, count in chunk)
        took_s = prefill.chunk_s(sum(count for _, count in chunk), pairs)
        if self._rows:
            took_s += self._round_s() - min(prefill.step_s, decode.step_s)
        self.now_s += took_s
        self._sampled(1)
        for handler, count in chunk:
            handler.unread -= count
            self.unread -= count
            if not handler.unread:
                self._queue.popleft()
                handler.first_s = self.now_s
                self._rows.append(handler)
                self._sampled_by(handler, 1)

    def _decode(self, until_s: float) -> None:
        """Run rounds with the same rows, until one has all its tokens or `until_s` has passed."""
        growth_s = self.costs.decode.context_s * len(self._rows)
        span = Rounds(self.now_s, min(row.left for row in self._rows), self._round_s(), growth_s)
        rounds = min(span.rounds_by(until_s) + 1, span.num_rounds)
        self.now_s = span.after_s(rounds)
        self._sampled(rounds)

    def _round_s(self) -> float:
        return self.costs.decode.round_s(len(self._rows), sum(row.context for row in self._rows))

    def _sampled(self, num_tokens: int) -> None:
        for row in tuple(self._rows):
            self._sampled_by(row, num_tokens)

    def _sampled_by(self, row: _AggregatedRequest, num_tokens: int) -> None:
        row.left -= num_tokens
        if row.left <= 0:
            row.last_s = self.now_s
            self._rows.remove(row)
            self._pages_used -= self._pages(row)

    def _pages(self, handler: _AggregatedRequest) -> int:
        return -(
            -(handler.planned.prompt_tokens + handler.planned.output_tokens)
            // self.costs.model.page_size
        )


def aggregated(num_workers: int, costs: Costs, load: Sequence[Planned]) -> list[Outcome]:
    """Return the outcome of every request, in order of arrival; one that fits no worker fails."""
    workers = [_AggregatedWorker(costs) for _ in range(num_workers)]
    handlers = []
    for planned in load:
        for worker in workers:
            worker.advance(planned.at_s)
        handlers.append(_AggregatedRequest(planned, planned.prompt_tokens, planned.output_tokens))
        min(workers, key=lambda worker: worker.unread).take(handlers[-1])
    for worker in workers:
        worker.advance(END_S)
    return [_outcome(handler) for handler in handlers]


def _outcome(handler: _AggregatedRequest) -> Outcome:
    if not handler.last_s:
        return Outcome(None, (), 0, None, CapacityError.reason, handler.planned.at_s)
    times = tuple(at_s - handler.planned.at_s for at_s in (handler.first_s, handler.last_s))
    return Outcome(times[0], times, handler.planned.output_tokens, None, None, handler.planned.at_s)
