"""Prompts that a decode pool prefills itself, on a scheduler beside its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode.entry import DecodeEmitter, DecodeEntry
from decode.request_memory import Reservation
from decode.speculation import DraftState
from engine.core.request import Request, SampledToken
from engine.memory.leases import PageLease, SlotLease
from runtime.clock import Deadline


@dataclass(frozen=True)
class ComputedPrompt:
    """A computed prompt with its memory, which its new owner releases.

    `known` are the output tokens that the client has already; `first_token` is the next one if
    there are none.
    """

    key: int
    request: Request
    emit: DecodeEmitter
    deadline: Deadline
    blocks: tuple[bytes, ...]
    compatibility: str
    pages: PageLease
    slot: SlotLease
    first_token: SampledToken | None
    draft: DraftState
    known: tuple[int, ...] = ()

    def entry(self) -> DecodeEntry:
        """Return the request as a decode scheduler has it before its first token."""
        entry = DecodeEntry(
            self.key,
            self.request,
            self.emit,
            deadline=self.deadline,
            blocks=self.blocks,
            compatibility=self.compatibility,
            pages=self.pages,
            slot=self.slot,
            draft=self.draft,
            outputs=list(self.known),
        )
        entry.advance(len(self.request.prompt_token_ids))
        return entry


class PromptReader(Protocol):
    """A scheduler that prefills whole prompts on the same pool, and hands their memory over."""

    @property
    def num_prompts(self) -> int:
        """Return the number of requests that are not handed over yet."""
        ...

    def read(
        self,
        request: Request,
        emit: DecodeEmitter,
        *,
        blocks: tuple[bytes, ...],
        compatibility: str,
        deadline: Deadline,
    ) -> Reservation:
        """Queue a prompt; return its key, without memory.

        Raises:
            CapacityError: the queue is full.
            InvalidRequestError: the prompt could never fit.
        """
        ...

    def expect(
        self,
        key: int,
        request: Request,
        emit: DecodeEmitter,
        *,
        replayed: Sequence[int],
        blocks: tuple[bytes, ...],
        compatibility: str,
        deadline: Deadline,
    ) -> None:
        """Expect to go on with the prompt of `key`, which a router has sent to be prefilled.

        The other arguments are those of `DecodeScheduler.reserve`.

        Raises:
            CapacityError: as for `DecodeScheduler.reserve`.
            HandoffError: the prompt is not there any more.
            IncompatiblePeerError: it is the prompt of another request.
            InvalidRequestError: the request could never fit.
        """
        ...

    def join(self, key: int, first_token: int) -> None:
        """Go on with an expected prompt, which is computed. Ignores keys released meanwhile.

        Raises:
            HandoffError: the prompt is not there any more.
        """
        ...

    def holds(self, key: int) -> bool: ...

    def release(self, key: int) -> None:
        """End a request that is not handed over yet. Idempotent."""
        ...
