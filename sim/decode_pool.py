"""Simulation of the requests on a decode pool and the times of their tokens. Pure.

Times are seconds of the caller's clock. Rows go through rounds; each round gives every row its next
token (with drafts, its next few). While the rows stay the same, their rounds form a *span*, which
need not be computed round by round. A span ends when the first row has all its tokens, when pages
run out, or, if the rows are to change, with the current round.

Memory follows the rules of `decode.scheduler`. A request is admitted with pages for some growth.
When pages run out, the least urgent and youngest request is preempted. It is readmitted, and
recomputed, before any new request.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from runtime.errors import CapacityError
from sim.costs import DecodeCosts
from sim.pages import PoolPages


@dataclass(eq=False)
class SimulatedRow:
    """One request.

    `context` tokens are computed, prompt included, and `left` are to be generated. `again` tokens
    must be recomputed before that. `unsent` tokens were generated and not yet taken by the caller.
    """

    key: int
    context: int
    left: int
    priority: int = 0
    again: int = 0
    unsent: int = 0
    num_pages: int = 0
    joined_s: float = 0.0
    first_step_s: float | None = None
    num_preemptions: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Return the sort key of its turn; smaller is sooner."""
        return self.priority, self.key


@dataclass(frozen=True)
class Rounds:
    """Rounds of the same rows. The first takes `first_s`, and each takes `growth_s` more than the
    previous.
    """

    began_s: float
    num_rounds: int
    first_s: float
    growth_s: float

    def after_s(self, num_rounds: int) -> float:
        """Return the time at the end of round `num_rounds`."""
        return (
            self.began_s
            + num_rounds * self.first_s
            + self.growth_s * num_rounds * (num_rounds - 1) / 2
        )

    @property
    def ends_s(self) -> float:
        return self.after_s(self.num_rounds)

    def rounds_by(self, now_s: float) -> int:
        """Return the number of rounds over at `now_s`, by solving `after_s` for it."""
        passed_s = now_s - self.began_s
        if passed_s <= 0:
            return 0
        if self.growth_s < 1e-9 * self.first_s:
            found = passed_s / self.first_s
        else:
            middle = self.first_s / self.growth_s - 0.5
            found = math.sqrt(middle * middle + 2 * passed_s / self.growth_s) - middle
        return min(int(found + 1e-9), self.num_rounds)


@dataclass
class DecodePool:
    """Requests of one pool.

    `advance` must be called when `span` ends; it returns the rows that have ended. Spans are in
    seconds of processor time, as the caller passes them. Requests record their times by `clock`.
    """

    costs: DecodeCosts
    page_size: int
    clock: Callable[[], float]
    pages: PoolPages
    span: Rounds | None = None
    busy_s: float = 0.0
    num_sampled: int = 0
    num_preemptions: int = 0
    _held: dict[int, SimulatedRow] = field(default_factory=dict)  # all requests, by key
    _running: list[SimulatedRow] = field(default_factory=list)
    _joining: list[SimulatedRow] = field(default_factory=list)
    _waiting: list[SimulatedRow] = field(default_factory=list)  # preempted
    _interruption_s: float = 0.0  # added before the next round

    def reserve(self, row: SimulatedRow) -> None:
        """Reserve memory for a request.

        Raises:
            CapacityError: the pool has no room, or preempted requests go first.
        """
        if self._waiting:
            raise CapacityError(
                f"{len(self._waiting)} preempted requests wait for pages first", resource="pages"
            )
        if len(self._held) >= self.costs.max_held:
            raise CapacityError(
                f"{len(self._held)} requests hold memory, the limit is {self.costs.max_held}",
                resource="held requests",
            )
        if self.costs.num_slots and self.slots_free < 1:
            raise CapacityError("every slot is taken", resource="slots")
        num_pages = self._pages_of(row)
        if num_pages > self.pages.num_free:
            raise CapacityError(f"{num_pages} pages are needed", resource="pages")
        self._take(row, num_pages)
        self._held[row.key] = row

    def interrupt(self, takes_s: float, now_s: float) -> bool:
        """Delay running rows by `takes_s`, after the current round; return whether any run."""
        if not takes_s or self.span is None:
            return False
        self.delay(takes_s)
        self._change(now_s)
        return True

    def delay(self, takes_s: float) -> None:
        """Delay the start of the next span by `takes_s`."""
        self._interruption_s += takes_s

    def adopt(self, row: SimulatedRow) -> None:
        """Hold a request whose prompt was computed in these pages, `row.num_pages` of them."""
        self._held[row.key] = row

    def join(self, row: SimulatedRow, now_s: float) -> None:
        """Add a request whose prompt has landed."""
        row.joined_s = self.clock()
        self._joining.append(row)
        self._change(now_s)

    def release(self, row: SimulatedRow, now_s: float) -> None:
        """Remove a request. Memory of a running row is free at the end of the round. Idempotent."""
        if self._held.pop(row.key, None) is None:
            return
        if row in self._running:
            self._change(now_s)
            return
        self._give_back(row)
        for rows in (self._joining, self._waiting):
            if row in rows:
                rows.remove(row)
        self._change(now_s)

    def advance(self, now_s: float) -> list[SimulatedRow]:
        """End the span; return the rows that have all their tokens and were removed."""
        if self.span is not None:
            self._decode(self.span)
            self.span = None
        done = [row for row in self._running if row.left <= 0 and row.key in self._held]
        gone = [row for row in self._running if row.left <= 0 or row.key not in self._held]
        for row in gone:
            self._give_back(row)
            self._held.pop(row.key, None)
        self._running = [row for row in self._running if row.left > 0 and row.key in self._held]
        self._begin(now_s)
        return done

    def generated(self, row: SimulatedRow, now_s: float) -> int:
        """Take and return the number of tokens a row has generated, current span included."""
        within = (
            min(self._tokens(self.span.rounds_by(now_s)), row.left)
            if self.span and row in self._running
            else 0
        )
        taken = row.unsent + within
        row.unsent = -within
        return taken

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_running(self) -> int:
        """Return the number of rows that generate tokens now."""
        return len(self._running)

    def num_generated(self, now_s: float) -> int:
        """Return the tokens generated so far, those of the current span included."""
        if self.span is None:
            return self.num_sampled
        return self.num_sampled + self._tokens(self.span.rounds_by(now_s)) * len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def slots_free(self) -> int:
        return max(0, self.costs.num_slots - len(self._held) + len(self._waiting))

    def pages_free(self, now_s: float) -> int:
        """Return the free pages as the pool would report them within a span."""
        within = 0
        if self.span is not None:
            rounds = self.span.rounds_by(now_s)
            within = self._growth(self._running, rounds)
        return max(0, self.pages.num_free - within)

    def check(self) -> None:
        """Check the count of used pages.

        Raises:
            InternalError: pages are held without a request.
        """
        self.pages.check(sum(row.num_pages for row in {*self._held.values(), *self._running}))

    def _begin(self, now_s: float) -> None:
        """Begin the next span, if any row is running."""
        again_s = self._readmit() * self.costs.replay_s
        self._running += self._joining
        self._joining = []
        while (rounds := self._rounds()) == 0:
            self._set_back(max(self._running, key=lambda row: row.turn))
        if not rounds:
            return
        again_s += sum(row.again for row in self._running) * self.costs.replay_s
        for row in self._running:
            row.again = 0
            row.first_step_s = self.clock() if row.first_step_s is None else row.first_step_s
        if self.pages.is_shared:
            for row in self._running:
                self._take(row, self._growth((row,), rounds))
        count = len(self._running)
        context = sum(row.context for row in self._running)
        again_s += self._interruption_s
        self._interruption_s = 0.0
        first_s = self.costs.round_s(count, context)
        growth_s = self.costs.context_s * count * self.costs.tokens_per_step
        self.span = Rounds(now_s + again_s, rounds, first_s, growth_s)
        self.busy_s += again_s

    def _change(self, now_s: float) -> None:
        """End the span with the current round, because the rows are to change."""
        if self.span is None:
            self._begin(now_s)
            return
        rounds = min(self.span.rounds_by(now_s) + 1, self.span.num_rounds)
        self.span = Rounds(self.span.began_s, rounds, self.span.first_s, self.span.growth_s)

    def _decode(self, span: Rounds) -> None:
        tokens = self._tokens(span.num_rounds)
        self.busy_s += span.ends_s - span.began_s
        for row in self._running:
            self._take(row, self._growth((row,), span.num_rounds))
            count = min(tokens, row.left)
            row.context += count
            row.left -= count
            row.unsent += count
            self.num_sampled += count

    def _rounds(self) -> int | None:
        """Return the rounds until the first row has its tokens or pages run out.

        None without rows; 0 if no page is left for a row.
        """
        if not self._running:
            return None
        fewest = min(row.left for row in self._running)
        rounds = max(1, math.ceil(fewest / self.costs.tokens_per_step))
        free = self.pages.num_free
        if self._growth(self._running, rounds) <= free:
            return rounds
        # `low` rounds fit and `high` do not
        low = 0
        high = rounds
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._growth(self._running, middle) <= free
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _readmit(self) -> int:
        """Readmit preempted rows while memory suffices; return the tokens to recompute."""
        tokens = 0
        self._waiting.sort(key=lambda row: row.turn)
        while self._waiting:
            row = self._waiting[0]
            num_pages = self._pages_of(row)
            if num_pages > self.pages.num_free:
                break
            self._take(row, num_pages)
            self._running.append(self._waiting.pop(0))
            tokens += row.context
        return tokens

    def _set_back(self, row: SimulatedRow) -> None:
        self._give_back(row)
        self._running.remove(row)
        self._waiting.append(row)
        row.num_preemptions += 1
        self.num_preemptions += 1

    def _tokens(self, num_rounds: int) -> int:
        """Return the tokens of one row in `num_rounds` rounds."""
        return math.floor(num_rounds * self.costs.tokens_per_step + 1e-9)

    def _pages_of(self, row: SimulatedRow) -> int:
        """Return the pages for a row with some growth, but at most its maximum length."""
        tokens = row.context + min(self.costs.growth_tokens, max(row.left, 0))
        return -(-tokens // self.page_size)

    def _growth(self, rows: Iterable[SimulatedRow], num_rounds: int) -> int:
        """Return the pages that rows take within `num_rounds`. Fast, because every report asks for
        it.
        """
        tokens = self._tokens(num_rounds)
        page_size = self.page_size
        num_pages = 0
        for row in rows:
            more = (
                -(-(row.context + (tokens if tokens < row.left else row.left)) // page_size)
                - row.num_pages
            )
            if more > 0:
                num_pages += more
        return num_pages

    def _take(self, row: SimulatedRow, num_pages: int) -> None:
        row.num_pages += num_pages
        self.pages.take(row.key, num_pages)

    def _give_back(self, row: SimulatedRow) -> None:
        self.pages.give_back(row.key, row.num_pages)
        row.num_pages = 0
