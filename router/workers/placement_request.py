"""What a request needs of its workers, and the pair that it gets."""

from dataclasses import dataclass

from router.workers.adapters import has_adapter
from router.workers.prefix_index import RoutedPrompt
from router.workers.worker import Booking, Worker
from runtime.digests import may_pair


@dataclass(frozen=True)
class PlacementRequest:
    """What a request needs of its workers.

    `context_tokens` is its maximum length, prompt plus completion: smaller workers are passed over.
    `compatibility` is the digest that the workers must fit; "" for any.
    """

    prompt: RoutedPrompt
    context_tokens: int = 0
    compatibility: str = ""

    def of_kind(self, compatibility: str) -> "PlacementRequest":
        """Return the request for workers that fit this digest."""
        return PlacementRequest(self.prompt, self.context_tokens, compatibility)

    def fits(self, worker: Worker) -> bool:
        """Return whether the worker can hold the request, with room or not.

        It must have the request's adapter, and fit its digest.
        """
        snapshot = worker.snapshot
        return (
            snapshot.longest >= self.context_tokens
            and (not self.compatibility or may_pair(snapshot.compatibility, self.compatibility))
            and (not self.prompt.adapter or has_adapter(worker, self.prompt.adapter))
        )

    def has_room(self, worker: Worker) -> bool:
        """Return whether the worker has room for the request now or soon."""
        return worker.snapshot.has_room(self.prompt.num_tokens, self.context_tokens)


@dataclass(frozen=True)
class WorkerPair:
    """A pair of workers for one request. The decode pool reserves only when prefill starts."""

    prefill: Booking
    decode: Booking

    @property
    def is_aggregated(self) -> bool:
        """Return whether one worker has both roles, so that nothing is handed over."""
        return self.prefill.address == self.decode.address

    @property
    def kind(self) -> str:
        """Return how metrics and traces name the placement."""
        return "aggregated" if self.is_aggregated else "disaggregated"

    def release(self) -> None:
        self.prefill.release()
        self.decode.release()
