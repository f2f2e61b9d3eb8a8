"""Cores, and how fast goes on what computes on them.

Every worker has a core for itself, unless a fleet is of one machine (`MachineCosts`). There whoever
computes on a core gets an even share of it, as processes do under a fair scheduler: workers on the
cores that `baton.core_places` gives them, and what router and client do for a request wherever the
least is computed. What they do for tokens is a little of every core all the time; it is taken off
first, since who wants less than a share gets it.
"""

import asyncio
from collections.abc import Callable
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
        self.processor, self.at_s, self.callback, self.arguments = (
            processor,
            at_s,
            callback,
            arguments,
        )
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Idempotent."""
        if self.handle is not None and self.processor.alarms.pop(self, self) is None:
            self.handle.cancel()


class Processor:
    """What one worker computes with. Its time passes as fast as the loop's where it has a core for
    itself, and slower where it shares one: work is so many seconds of it, whoever computes
    beside."""

    def __init__(self, loop: asyncio.AbstractEventLoop, core: "Core | None" = None) -> None:
        self._loop = loop
        self._core = core
        self._rate = 1.0
        self._since_s = self._passed_s = (
            0.0  # the loop's time of the last change of rate, and its own then
        )
        self._slowness = 1.0
        self._is_computing = False
        self.alarms: dict[Alarm, None] = {}
        self.messages = 0.0  # seconds of any core that router and client take for each of its own

    def now(self) -> float:
        """Its time."""
        return self._passed_s + (self._loop.time() - self._since_s) * self._rate

    def call_at(self, at_s: float, callback: Callable[..., object], *arguments: object) -> Alarm:
        """At a moment of its time, while it computes."""
        alarm = Alarm(self, at_s, callback, arguments)
        self.alarms[alarm] = None
        self._arm(alarm)
        return alarm

    def compute(self, *, is_computing: bool, messages: float = 0.0) -> None:
        """Whether it does, from now on, and what that makes router and client do (see
        `messages`)."""
        if is_computing == self._is_computing and messages == self.messages:
            return
        self._is_computing, self.messages = is_computing, messages
        if self._core is not None:
            self._core.computes(self, is_computing=is_computing)

    def slow_down(self, slowness: float) -> None:
        """It takes so many times as long, from now on."""
        share = self._rate * self._slowness
        self._slowness = slowness
        self.give(share)

    def give(self, share: float) -> None:
        """So much of a core, from now on."""
        rate = share / self._slowness
        if rate != self._rate:
            self._passed_s, self._since_s, self._rate = self.now(), self._loop.time(), rate
            for alarm in self.alarms:
                if alarm.handle is not None:
                    alarm.handle.cancel()
                self._arm(alarm)

    def spend(self, seconds: float) -> None:
        """Beside what it computes, as another thread of its process does; without a machine that
        has a core of its own."""
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
    """One of a machine's."""

    def __init__(self, machine: "Machine", loop: asyncio.AbstractEventLoop) -> None:
        self._machine = machine
        self._loop = loop
        self.computing: dict[Processor, None] = {}

    def computes(self, processor: Processor, *, is_computing: bool) -> None:
        """It does, or does not any more."""
        if is_computing:
            self.computing[processor] = None
        else:
            self.computing.pop(processor, None)
        self._machine.share()

    def spend(self, seconds: float, spent: Callable[[], None]) -> None:
        """So much of this core, in turn with all others; then `spent` is called."""
        work = Processor(self._loop, self)

        def done() -> None:
            work.compute(is_computing=False)
            spent()

        work.compute(is_computing=True)
        work.call_at(work.now() + seconds, done)


class Machine:
    """The cores of a fleet's workers, by their names."""

    def __init__(self, costs: MachineCosts, roles: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._costs = costs
        self._cores = [Core(self, self._loop) for _ in range(costs.cores)]
        places = core_places(roles, range(costs.cores)) if costs.cores else {}
        self._places = {name: self._cores[cores[0]] for name, cores in places.items()}

    def processor(self, name: str) -> Processor:
        """Of this worker."""
        return Processor(self._loop, self._places.get(name))

    def messages(self, num_rows: int, round_s: float) -> float:
        """As `Processor.messages`, of a pool that draws a token for each of so many rows in so many
        seconds."""
        return (
            (self._costs.round_s + num_rows * self._costs.token_s) / round_s if self._cores else 0.0
        )

    async def receive(self, num_tokens: int) -> None:
        """What router and client compute for a request that comes, with so long a prompt, before it
        is given to workers: half of what they compute for it at all."""
        if self._cores:
            done = self._loop.create_future()
            self._spend(num_tokens, partial(_end, done))
            await done

    def answer(self, num_tokens: int) -> None:
        """The other half, with the first token of such a prompt's answer."""
        if self._cores:
            self._spend(num_tokens, lambda: None)

    def _spend(self, num_tokens: int, spent: Callable[[], None]) -> None:
        core = min(self._cores, key=lambda core: len(core.computing))
        core.spend((self._costs.request_s + num_tokens * self._costs.prompt_token_s) / 2, spent)

    def share(self) -> None:
        """Give every processor its part. What messages take is taken off first, which slows down
        those that cause them: of what they would cause with whole cores they cause as much as is
        left of these."""
        wanted = sum(
            processor.messages / len(core.computing)
            for core in self._cores
            for processor in core.computing
        )
        left = self._costs.speed / (1 + wanted / len(self._cores))
        for core in self._cores:
            for processor in tuple(core.computing):
                processor.give(left / len(core.computing))


def _end(wait: "asyncio.Future[None]") -> None:
    if not wait.done():
        wait.set_result(None)
