"""One request on a simulated decode worker."""

from dataclasses import dataclass

from protos import decode_pb2
from sim.decode_pool import SimulatedRow
from sim.intake import QueuedPrompt
from sim.requests import SimulatedRequest

DecodeRequest = SimulatedRequest[decode_pb2.DecodeInput, decode_pb2.DecodeEvent]


@dataclass(eq=False)
class SimulatedDecodeHandler:
    """One request on this worker, to its end."""

    request: DecodeRequest
    row: SimulatedRow
    session_id: str
    num_tokens: int  # output tokens that its router has
    num_offers: int = 0
    num_bytes: float = 0.0
    has_landed: bool = False
    first_token_s: float | None = None
    is_committed: bool = False
    prompt: QueuedPrompt | None = None  # of the worker's own prefill, not computed yet

    @property
    def epoch(self) -> int:
        return self.num_offers - 1
