"""Cores, and the speed of the work on them.

Every worker has a core of its own, unless the fleet runs on one machine (`MachineCosts`). There the
work on a core gets even shares of it, as processes do under a fair scheduler. Workers run on the
cores that `baton.core_places` assigns. The work of router and client for a request runs on the
least loaded core. Their work for tokens is a small part of every core all the time. It is
subtracted first, because work that wants less than its share gets all it wants.

A worker of both roles has two processors, one for prompts and one for decode steps. They share a
core by weight, in place of the chunks and steps that alternate in the loop of a real one.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from baton.core_places import core_places
from sim.costs import MachineCosts


class Alarm:
    """A callback at a moment of a processor's time. It ends by itself or is cancelled."""

    __slots__ = ("arguments", "at_s", "callback", "handle", "processor")

    def __init__(
        self,
        processor: "Processor",
        at_s: float,
        callback: Callable[..., object],
        arguments: tuple[object, ...],
    ) -> None:
        self.processor = processor
        self.at_s = at_s
        self.callback = callback
        self.arguments = arguments
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Cancel the callback. Idempotent."""
        if self.handle is not None and self.processor.alarms.pop(self, self) is None:
            self.handle.cancel()


class Processor:
    """Compute resource of one worker.

    Its time passes as fast as the loop's on a core of its own, and slower on a shared core. Work
    takes a fixed number of seconds of processor time, whatever else runs on the core.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, core: "Core | None" = None, weight: float = 1.0
    ) -> None:
        """Create a processor that gets the share `weight` of its core, out of all that compute."""
        self._loop = loop
        self._core = core
        self.weight = weight
        self._rate = 1.0
        # Loop time of the last change of rate, and processor time at that moment.
        self._since_s = self._passed_s = 0.0
        self._slowness = 1.0
        self._is_computing = False
        self.alarms: dict[Alarm, None] = {}
        self.messages = 0.0  # core seconds of router and client for each of its own seconds

    def now(self) -> float:
        """Return the processor time in seconds."""
        return self._passed_s + (self._loop.time() - self._since_s) * self._rate

    def call_at(self, at_s: float, callback: Callable[..., object], *arguments: object) -> Alarm:
        """Call `callback` at a moment of processor time."""
        alarm = Alarm(self, at_s, callback, arguments)
        self.alarms[alarm] = None
        self._arm(alarm)
        return alarm

    def compute(self, *, is_computing: bool, messages: float = 0.0) -> None:
        """Set whether the processor computes, and the work that it causes (`messages`)."""
        if is_computing == self._is_computing and messages == self.messages:
            return
        self._is_computing = is_computing
        self.messages = messages
        if self._core is not None:
            self._core.computes(self, is_computing=is_computing)

    def slow_down(self, slowness: float) -> None:
        """Multiply the duration of all work by `slowness` from now on."""
        share = self._rate * self._slowness
        self._slowness = slowness
        self.give(share)

    def give(self, share: float) -> None:
        """Set the processor's share of a core from now on."""
        rate = share / self._slowness
        if rate != self._rate:
            self._passed_s, self._since_s, self._rate = self.now(), self._loop.time(), rate
            for alarm in self.alarms:
                if alarm.handle is not None:
                    alarm.handle.cancel()
                self._arm(alarm)

    def spend(self, seconds: float) -> None:
        """Spend core time in parallel to the computation, like another thread of the process.

        Has no effect if the worker has a core of its own.
        """
        if self._core is not None:
            self._core.spend(seconds, lambda: None)

    def _arm(self, alarm: Alarm) -> None:
        alarm.handle = self._loop.call_at(
            self._since_s + (alarm.at_s - self._passed_s) / self._rate, self._ring, alarm
        )

    def _ring(self, alarm: Alarm) -> None:
        del self.alarms[alarm]
        alarm.callback(*alarm.arguments)


class Core:
    """One core of a machine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, machine: "Machine | None" = None) -> None:
        """Create a core of `machine`; without one the core belongs to one worker."""
        self._machine = machine
        self._loop = loop
        self.computing: dict[Processor, None] = {}

    def computes(self, processor: Processor, *, is_computing: bool) -> None:
        """Add or remove a computing processor."""
        if is_computing:
            self.computing[processor] = None
        else:
            self.computing.pop(processor, None)
        if self._machine is None:
            self.share(1.0)
        else:
            self._machine.share()

    def share(self, speed: float) -> None:
        """Divide `speed` among the computing processors by weight."""
        weights = sum(processor.weight for processor in self.computing)
        for processor in tuple(self.computing):
            processor.give(speed * processor.weight / weights)

    def spend(self, seconds: float, spent: Callable[[], None]) -> None:
        """Spend `seconds` of this core in competition with the other work; then call `spent`."""
        work = Processor(self._loop, self)

        def done() -> None:
            work.compute(is_computing=False)
            spent()

        work.compute(is_computing=True)
        work.call_at(work.now() + seconds, done)


class Machine:
    """The cores of a fleet's workers, by worker name."""

    def __init__(self, costs: MachineCosts, roles: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._costs = costs
        self._cores = [Core(self._loop, self) for _ in range(costs.cores)]
        places = core_places(roles, range(costs.cores)) if costs.cores else {}
        self._places = {name: self._cores[cores[0]] for name, cores in places.items()}

    def processor(self, name: str) -> Processor:
        """Return a processor for this worker."""
        return Processor(self._loop, self._places.get(name))

    def processors(self, name: str, weights: Sequence[float]) -> list[Processor]:
        """Return processors for this worker that share its core by weight."""
        core = self._places.get(name) or Core(self._loop)
        return [Processor(self._loop, core, weight) for weight in weights]

    def messages(self, num_rows: int, round_s: float) -> float:
        """Return `Processor.messages` of a pool that generates a token for `num_rows` rows in
        `round_s`.
        """
        return (
            (self._costs.round_s + num_rows * self._costs.token_s) / round_s if self._cores else 0.0
        )

    async def receive(self, num_tokens: int) -> None:
        """Spend half of the router's and client's work for a request, before it is placed on
        workers.

        `num_tokens` is the length of its prompt.
        """
        if self._cores:
            done = self._loop.create_future()
            self._spend(num_tokens, partial(_end, done))
            await done

    def answer(self, num_tokens: int) -> None:
        """Spend the other half, with the first token of the response."""
        if self._cores:
            self._spend(num_tokens, lambda: None)

    def _spend(self, num_tokens: int, spent: Callable[[], None]) -> None:
        core = min(self._cores, key=lambda core: len(core.computing))
        core.spend((self._costs.request_s + num_tokens * self._costs.prompt_token_s) / 2, spent)

    def share(self) -> None:
        """Set every processor's share of its core.

        The work for messages is subtracted first. That slows down the processors that cause it,
        which then cause proportionally less.
        """
        wanted = sum(
            processor.messages / len(core.computing)
            for core in self._cores
            for processor in core.computing
        )
        left = self._costs.speed / (1 + wanted / len(self._cores))
        for core in self._cores:
            core.share(left)


def _end(wait: "asyncio.Future[None]") -> None:
    if not wait.done():
        wait.set_result(None)
