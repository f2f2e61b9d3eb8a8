"""Adaptive draft length, chosen from measured throughput.

A longer draft makes a step slower and may yield more tokens per step. The best length depends on
the draft, the text and the number of requests in the step. So each class of batch sizes records the
tokens per second of the candidate lengths, runs the best one, and tries another from time to time.
A length is replaced only by one that is clearly better.

A draft model that skips sampled tokens is lost for the rest of the response. So a trial without
drafts still lets the draft model follow, and it stops following only once "no draft" has become the
best length. After that, a trial of longer drafts measures responses whose draft state starts at the
current position.
"""

from dataclasses import dataclass, field

from decode.speculation import VerifiedStep


@dataclass
class _Yield:
    """Tokens and seconds of one length, with exponentially decaying weights."""

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
    """The measurements of one class of batch sizes.

    `best` and `tried` are indices into the lengths; they differ only during a trial. `interval` is
    the number of steps between trials. It grows while the best length stays the best.
    """

    yields: list[_Yield]
    best: int
    tried: int
    interval: int
    steps_left: int
    next_trial: int = 0


@dataclass
class AdaptiveDraft:
    """Choice among no draft, a short draft and `max_nodes`. Belongs to the engine thread.

    A trial of another length lasts `trial_steps`. The first trial starts after `first_interval`
    steps; while the best length stays the best, the interval grows up to `trial_interval`. The
    first `settling_steps` after a change are not counted, because their trees still have the old
    length. A length replaces the best one if its throughput is higher by the fraction `margin`.
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
        """Return the drafted nodes per request for this number of running requests.

        None means that the draft model need not follow the sampled tokens either.
        """
        found = self._class_of(num_running)
        length = self.lengths[found.tried]
        return length if length or found.tried != found.best else None

    def observe(self, step: VerifiedStep, num_running: int) -> None:
        """Record a step and choose the length of the next steps."""
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
                found.best = found.tried
                found.interval = self.first_interval
            else:
                found.interval = min(2 * found.interval, self.trial_interval)
            found.tried = found.best
            found.steps_left = found.interval
        else:
            others = [place for place in range(len(self.lengths)) if place != found.best]
            found.tried = others[found.next_trial % len(others)]
            found.next_trial += 1
            found.yields[found.tried] = _Yield()  # old measurements do not describe the present
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
