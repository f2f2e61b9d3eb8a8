"""Terms of one handoff between two pools, as plain values.

`transfer/plan/codec.py` maps them to the wire.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank


@dataclass(frozen=True)
class StageEndpoint:
    """One process of a pool.

    It has its layers, the address of its transfer worker, its incarnation, and its rank in its
    stage.
    """

    layers: LayerRange
    address: bytes
    incarnation: str
    tensor: TensorRank = ONLY_RANK


@dataclass(frozen=True)
class SourceTerms:
    """Terms of the sending side.

    `page_ids` are the prompt's pages in position order. No item spans a multiple of `chunk_tokens`,
    so that an item can be sent as soon as its chunk has passed its layer. `sends_rest`: pages that
    the destination has cached need not be sent. `request_key` names the prompt for a pool that
    decodes what it has prefilled itself; 0 if it only prefills. `is_loan`: these are cached blocks
    without a request, so that nothing of a draft's first proposal is sent. `content` identifies the
    tokens: `prompt_digest` of a prompt, or the name of the last block of a loan.
    """

    compatibility: str
    compatibility_text: str
    page_size: int
    num_tokens: int
    chunk_tokens: int
    page_ids: tuple[int, ...]
    slot_id: int
    stages: tuple[StageEndpoint, ...]
    sends_rest: bool = False
    request_key: int = 0
    is_loan: bool = False
    content: bytes = b""


@dataclass(frozen=True)
class DestinationTerms:
    """Terms of the receiving side, which define the layout that the source delivers.

    `key` authenticates the items: it is random, belongs to one epoch and is never shown.
    `with_draft`: the destination also accepts the state of the source's draft. The destination has
    cached the pages of the prompt's first `held_tokens` tokens. Other requests may read these
    pages, so nothing is sent into them.
    """

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
    """States of one epoch of a session that a stage reports."""

    OPEN = "open"  # receives are posted, or sends are planned
    COMPLETE = "complete"  # everything was received and verified, or everything was sent
    FAILED = "failed"
    # Its memory can no longer be read or written; the last report of a session.
    DRAINED = "drained"


@dataclass(frozen=True)
class ChunkTiming:
    """Transfer of one chunk of a prompt by one stage, in seconds of the process's clock.

    The chunk ends at `num_tokens`. `released_s` is the release of its first layer, `left_s` the
    sending of its last byte.
    """

    num_tokens: int
    num_bytes: int
    released_s: float
    left_s: float


@dataclass(frozen=True)
class StageSessionEvent:
    """State change of a session on this stage.

    `error_reason` is the `reason` of the BatonError, set if FAILED. `chunk_timings` are ordered by
    position in the prompt and set if a sending stage is COMPLETE; they stay in the process.
    """

    session_id: str
    epoch: int
    state: StageSessionState
    error_reason: str = ""
    error_text: str = ""
    num_bytes: int = 0
    chunk_timings: tuple[ChunkTiming, ...] = ()
