"""The two attentions of a draft, over its pages and within a round, for either kind of cache."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.backends.cpu.recurrent import CpuRecurrent
from engine.contracts.attention import AttentionBackend
from engine.contracts.latent import LatentAttentionBackend
from engine.contracts.model import ForwardContext
from engine.core.batch import BatchPlanner, ForwardBatch
from engine.core.numerics import Numerics
from engine.graphs.runner import GraphAttention
from engine.speculative.attention.multistep_device import DeviceRounds
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from engine.speculative.attention.multistep_paged import PagedRounds


class RoundPlanner(BatchPlanner, Protocol):
    """A planner for a round of drafting, in which each step continues branches of the last one."""

    def reorder(self, batch: ForwardBatch, parents: Tensor) -> None:
        """Continue the branches at `parents` [R, K] of the last step in the next one."""
        ...


class RoundAttention(AttentionBackend, RoundPlanner, Protocol):
    """Attention within a round over keys and values."""


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
    capturable_round: DeviceRounds | None = None
    recordable_round: PagedRounds | None = None

    @classmethod
    def over_kv(
        cls, paged: AttentionBackend, multi_step: RoundAttention, page_size: int
    ) -> "DraftAttention":
        return cls(
            paged,
            ForwardContext(paged, no_states()),
            multi_step,
            ForwardContext(multi_step, no_states()),
            page_size,
        )

    @classmethod
    def over_latents(
        cls, paged: LatentAttentionBackend, multi_step: MultiStepLatentAttention, page_size: int
    ) -> "DraftAttention":
        return cls(
            paged,
            ForwardContext(None, no_states(), latent_attention=paged),
            multi_step,
            ForwardContext(None, no_states(), latent_attention=multi_step),
            page_size,
        )


def no_states() -> CpuRecurrent:
    """Return a recurrent backend without pools: no draft has a recurrent layer."""
    return CpuRecurrent(conv_pools={}, state_pools={}, numerics=Numerics.EXACT)
