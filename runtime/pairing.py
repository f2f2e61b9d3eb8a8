"""Which digests of two pools fit together.

A digest names what both must have alike; behind a `+` it may name the draft whose state is handed over with a prompt.
A pool without that part takes prompts without it and hands them over without it.
"""

_DRAFT = "+"


def pairing_digest(model: str, draft: str) -> str:
    """`draft` is empty where no draft's state is handed over."""
    return f"{model}{_DRAFT}{draft}" if draft else model


def may_pair(first: str, second: str) -> bool:
    """Whether one pool may hand prompts to the other: the same model, and not two different drafts."""
    (model, _, draft), (other_model, _, other_draft) = first.partition(_DRAFT), second.partition(_DRAFT)
    return model == other_model and (draft == other_draft or not (draft and other_draft))


def share_draft(first: str, second: str) -> bool:
    """Whether the state of a draft crosses between the two."""
    return may_pair(first, second) and _DRAFT in first and _DRAFT in second
