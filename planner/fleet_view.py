"""What the planner sees of a fleet at one moment."""

from collections.abc import Iterable
from dataclasses import dataclass

PREFILL = "prefill"
DECODE = "decode"
ONLY_PREFILL, ONLY_DECODE = frozenset((PREFILL,)), frozenset((DECODE,))
BOTH = ONLY_PREFILL | ONLY_DECODE
FULL = 0.95  # share of its places from which decode is full


@dataclass(frozen=True)
class WorkerView:
    """One worker. Counters with a `num_` prefix start at zero with its process.

    able                roles that it can serve
    active              roles that it serves, or will serve once it has started
    is_serving          whether it takes requests; false while it starts, drains or is lost
    queued_tokens       prompt tokens to compute
    running             requests in decode
    landing             requests that wait for their prompt, with memory in decode
    most_running        requests that it decodes at a time
    pages_used          share of its pages
    prompt_rate         prompt tokens per second while it has prompts, as routers measure; 0 if unknown
    token_s             seconds between tokens of one of its responses, likewise
    num_prompt_tokens   prompt tokens computed so far
    num_output_tokens   tokens generated so far
    """

    address: str
    able: frozenset[str]
    active: frozenset[str]
    is_serving: bool = True
    queued_tokens: int = 0
    running: int = 0
    landing: int = 0
    most_running: int = 1
    pages_used: float = 0.0
    prompt_rate: float = 0.0
    token_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True)
class FleetView:
    """All workers at `at_s`, in seconds of any clock, and what waits in routers."""

    at_s: float
    workers: tuple[WorkerView, ...]
    waiting_requests: int = 0
    waiting_tokens: int = 0  # prompt tokens of these requests
    num_arrived: int = 0  # requests that routers let in since their start
    num_present: int = 0  # of them, those that have not ended

    @property
    def backlog_tokens(self) -> int:
        """Return the prompt tokens that arrived and are not computed."""
        return self.waiting_tokens + self.queued_tokens

    @property
    def queued_tokens(self) -> int:
        return sum(worker.queued_tokens for worker in self.workers)

    @property
    def is_decode_full(self) -> bool:
        """Return whether requests wait for room in decode rather than for prefill."""
        decoding = [worker for worker in self.workers if DECODE in worker.active]
        room = sum(worker.most_running for worker in decoding if worker.is_serving)
        return sum(worker.running + worker.landing for worker in decoding) >= FULL * room

    @property
    def running(self) -> int:
        return sum(worker.running for worker in self.workers)


def new_tokens(before: Iterable[WorkerView], now: Iterable[WorkerView]) -> tuple[int, int]:
    """Return the prompt tokens computed and the tokens generated between two views.

    Those of workers that restarted in between are not counted.
    """
    known = {worker.address: worker for worker in before}
    prompt_tokens = output_tokens = 0
    for worker in now:
        earlier = known.get(worker.address)
        if earlier is not None:
            prompt_tokens += max(worker.num_prompt_tokens - earlier.num_prompt_tokens, 0)
            output_tokens += max(worker.num_output_tokens - earlier.num_output_tokens, 0)
    return prompt_tokens, output_tokens
