"""When what was computed left: for traces, which show a handoff beside the computation it should hide behind."""

from runtime.clock import Clock
from transfer.plan.handoff_terms import ChunkTiming, SourceTerms


class ChunkTimingLog:
    """One per sender. Items are told by how many tokens make them ready."""

    def __init__(self, clock: Clock, source: SourceTerms) -> None:
        self._clock = clock
        self._source = source
        self._released_s: dict[int, float] = {}  # by chunk
        self._left: dict[int, tuple[int, float]] = {}

    def on_released(self, ready_tokens: int) -> None:
        chunk = (ready_tokens - 1) // self._source.chunk_tokens
        if chunk not in self._released_s:
            self._released_s[chunk] = self._clock.now()

    def on_left(self, ready_tokens: int, num_bytes: int) -> None:
        chunk = (ready_tokens - 1) // self._source.chunk_tokens
        before, _ = self._left.get(chunk, (0, 0.0))
        self._left[chunk] = (before + num_bytes, self._clock.now())

    def chunk_timings(self) -> tuple[ChunkTiming, ...]:
        """By position in the prompt."""
        return tuple(ChunkTiming(min((chunk + 1) * self._source.chunk_tokens, self._source.num_tokens), num_bytes,
                                 self._released_s[chunk], left_s)
                     for chunk, (num_bytes, left_s) in sorted(self._left.items()))
