"""What two pools agree on for one handoff, as plain values. `transfer/plan/codec.py` maps them to
the wire."""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank


@dataclass(frozen=True)
class StageEndpoint:
    """One process of a pool: its layers, the address of its transfer worker, its incarnation, and
    which rank of its stage it is."""

    layers: LayerRange
    address: bytes
    incarnation: str
    tensor: TensorRank = ONLY_RANK


@dataclass(frozen=True)
class SourceTerms:
    """The sending side. `page_ids` are the prompt's pages in position order; no item spans a
    multiple of `chunk_tokens`, so that an item can leave as soon as its chunk has passed its layer.
    `sends_rest`: pages that the destination holds need not be sent."""

    compatibility: str
    compatibility_text: str
    page_size: int
    num_tokens: int
    chunk_tokens: int
    page_ids: tuple[int, ...]
    slot_id: int
    stages: tuple[StageEndpoint, ...]
    sends_rest: bool = False


@dataclass(frozen=True)
class DestinationTerms:
    """The receiving side: "deliver it like this". The destination states the layout, the source
    delivers it. `key` authenticates what is sent: random, of this epoch alone, and never shown.
    `with_draft`: it takes the state of the source's draft, too. The pages of the prompt's first
    `held_tokens` are there already, and others may be reading them: nothing is sent into these."""

    session_id: str
    epoch: int
    tag_base: int
    page_ids: tuple[int, ...]
    slot_id: int
    stages: tuple[StageEndpoint, ...]
    plan_digest: str
    key: bytes = field(repr=False)
    with_draft: bool = False
    held_tokens: int = 0


class StageSessionState(StrEnum):
    """What a stage reports about one epoch of a session."""

    OPEN = "open"  # receives posted, or sends planned
    COMPLETE = "complete"  # everything landed and was checked, or everything was sent
    FAILED = "failed"
    DRAINED = (
        "drained"  # no read or write of its memory can still happen; the last report of a session
    )


@dataclass(frozen=True)
class ChunkTiming:
    """What has left a stage of the chunk of a prompt that ends at `num_tokens`: from the release of
    its first layer to its last byte, in seconds of the process's clock."""

    num_tokens: int
    num_bytes: int
    released_s: float
    left_s: float


@dataclass(frozen=True)
class StageSessionEvent:
    """A session changed on this stage. `error_reason` is the `reason` of the BatonError, set when
    FAILED. `chunk_timings` by position in the prompt, when a sending stage is COMPLETE; they stay
    in the process."""

    session_id: str
    epoch: int
    state: StageSessionState
    error_reason: str = ""
    error_text: str = ""
    num_bytes: int = 0
    chunk_timings: tuple[ChunkTiming, ...] = ()
