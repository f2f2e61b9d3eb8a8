"""The two attentions of a draft, over its pages and within a round, for either kind of cache."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.model import ForwardContext
from engine.contracts.recurrent import NoStates
from engine.core.batch import BatchPlanner, ForwardBatch
from engine.graphs.runner import GraphAttention


class RoundPlanner(BatchPlanner, Protocol):
    """A planner for a round of drafting, in which each step continues branches of the last one."""

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        ...


class RoundAttention(AttentionBackend, RoundPlanner, Protocol):
    """Attention within a round over keys and values."""


class LatentRoundAttention(LatentAttentionBackend, RoundPlanner, Protocol):
    """Attention within a round over latents."""


class GraphRoundAttention(RoundAttention, GraphAttention, Protocol):
    """Attention within a round that supports capture."""

    def restart(self, batch: ForwardBatch) -> None:
        """Drop the paths of the batch's round, so that its steps run again from the first."""
        ...


class RecordableRoundAttention(RoundAttention, Protocol):
    """Attention within a round that supports recordings on the host."""

    def has_room(self, num_tokens: int, num_steps: int) -> bool:
        """Return whether a round fits: tokens per step, and steps after the first level."""
        ...

    def reads_of(self, batch: ForwardBatch) -> object:
        """Return the inputs of the round that begins with this planned batch, as a dataclass.

        Raises:
            StalePlanError: another attention planned the batch.
        """
        ...


@dataclass(frozen=True)
class DraftAttention:
    """The planners of a draft, and the contexts for its layers.

    Both attentions read the same pools, in pages of `page_size` tokens, as the target does.
    `capturable` and `capturable_round` are `pages` and `round` for graphs, or None without support.
    `recordable_round` is the round's attention for recordings on the host, or None without support.
    """

    pages: BatchPlanner
    on_pages: ForwardContext
    round: RoundPlanner
    in_round: ForwardContext
    page_size: int
    capturable: GraphAttention | None = None
    capturable_round: GraphRoundAttention | None = None
    recordable_round: RecordableRoundAttention | None = None

    @classmethod
    def over_kv(
        cls, paged: AttentionBackend, multi_step: RoundAttention, page_size: int
    ) -> "DraftAttention":
        return cls(
            paged,
            ForwardContext(paged, NoStates()),
            multi_step,
            ForwardContext(multi_step, NoStates()),
            page_size,
        )

    @classmethod
    def over_latents(
        cls, paged: LatentAttentionBackend, multi_step: LatentRoundAttention, page_size: int
    ) -> "DraftAttention":
        return cls(
            paged,
            ForwardContext(None, NoStates(), latent_attention=paged),
            multi_step,
            ForwardContext(None, NoStates(), latent_attention=multi_step),
            page_size,
        )
