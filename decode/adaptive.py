"""How long drafts should be: measured, not modelled.

A longer draft makes a step slower and may make it yield more tokens; which wins depends on the
draft, the text and how many requests share the step. So a pool of each size class keeps what the
lengths in question have yielded per second, runs the best one, and tries another now and then. A
length is replaced only by one that is clearly better.

A draft that does not follow what is drawn is lost for the rest of its answer. So a trial of no
drafts lets them follow, and they are left out only once having none has turned out best. Behind
that a trial of longer ones measures what they yield to answers whose drafts begin anew.
"""

from dataclasses import dataclass, field

from decode.speculation import VerifiedStep


@dataclass
class _Yield:
    """Tokens and seconds of one length, the older the lighter."""

    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, tokens: float, seconds: float, *, memory: float) -> None:
        self.tokens = self.tokens * memory + tokens
        self.seconds = self.seconds * memory + seconds


@dataclass
class _SizeClass:
    """`best` and `tried` are places in the list of lengths; they are the same outside a trial.
    `interval` is the steps between trials: it grows while the best one stays the best."""

    yields: list[_Yield]
    best: int
    tried: int
    interval: int
    steps_left: int
    next_trial: int = 0


@dataclass
class AdaptiveDraft:
    """Chooses among no draft, a short one and `max_nodes`. Belongs to the engine thread.

    A trial of another length lasts `trial_steps`, after `first_interval` steps of the best one and,
    while it stays the best, up to `trial_interval`. The first `settling_steps` after a change are
    not counted, because their trees are still those of the old length. `margin` is how much better
    the other must be.
    """

    max_nodes: int
    first_interval: int = 64
    trial_interval: int = 256
    trial_steps: int = 8
    settling_steps: int = 2
    margin: float = 0.05
    memory: float = 0.97
    _classes: dict[int, _SizeClass] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({0, -(-self.max_nodes // 3), self.max_nodes}))

    def length(self, num_running: int) -> int | None:
        """Drafted nodes per request when so many requests run; None: drafts need not even
        follow."""
        found = self._class_of(num_running)
        length = self.lengths[found.tried]
        return length if length or found.tried != found.best else None

    def observe(self, step: VerifiedStep, num_running: int) -> None:
        """Account for a step and decide about the next ones."""
        found = self._class_of(num_running)
        trial = found.tried != found.best
        phase = self.trial_steps if trial else found.interval
        found.steps_left -= 1
        if found.steps_left < phase - self.settling_steps:
            found.yields[found.tried].add(step.num_tokens, step.seconds, memory=self.memory)
        if found.steps_left > 0:
            return
        if trial:
            if found.yields[found.tried].rate > found.yields[found.best].rate * (1 + self.margin):
                found.best, found.interval = found.tried, self.first_interval
            else:
                found.interval = min(2 * found.interval, self.trial_interval)
            found.tried, found.steps_left = found.best, found.interval
        else:
            others = [place for place in range(len(self.lengths)) if place != found.best]
            found.tried = others[found.next_trial % len(others)]
            found.next_trial += 1
            found.yields[found.tried] = _Yield()  # yields of long ago are no measure of the present
            found.steps_left = self.trial_steps

    def _class_of(self, num_running: int) -> _SizeClass:
        size = num_running.bit_length()
        if size not in self._classes:
            last = len(self.lengths) - 1
            self._classes[size] = _SizeClass(
                [_Yield() for _ in self.lengths],
                last,
                last,
                self.first_interval,
                self.first_interval,
            )
        return self._classes[size]
