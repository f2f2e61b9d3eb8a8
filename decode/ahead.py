"""The choice of requests for the step that is prepared while the current one computes.

Either all requests that would take the step then are chosen, or none. A row of that step contains
everything known without the due token: its position, its pages and its sampling parameters. If
anything else depends on the result, the pool waits for it, as it does without a step ahead:

    a prompt or a replay must be prefilled    it may end in a batch with others
    a preempted request waits                 for pages that the result may free
    pages are short                           preemption is decided with nothing in flight
    penalties count the token, or a grammar   its mask follows from the token

Belongs to the engine thread.
"""

from collections.abc import Sequence

from decode.entry import DecodeEntry, DecodeLimits
from engine.memory.leases import PageAllocator, pages_for_tokens


def lease_ahead(
    turns: Sequence[DecodeEntry], limits: DecodeLimits, pages: PageAllocator
) -> list[DecodeEntry]:
    """Return the running requests that take the next step; each then has a page for its token.

    `turns` are the running requests in turn order. Returns an empty list, and leases nothing, if
    the step cannot be prepared.
    """
    going_on = [entry for entry in turns if not entry.ends_with_due(limits.max_context_tokens)]
    if not all(map(_is_ready, going_on)):
        return []
    stepping = going_on[: limits.max_running]
    missing = [_missing_pages(entry, limits.page_size) for entry in stepping]
    if sum(missing) > pages.num_available:
        return []
    for entry, count in zip(stepping, missing, strict=True):
        if count and entry.pages is not None:
            entry.pages.extend(count)
    return stepping


def _is_ready(entry: DecodeEntry) -> bool:
    """Return whether its prompt and all tokens but the newest are computed or in flight.

    The newest token may still be due.
    """
    if entry.computed < len(entry.request.prompt_token_ids) or (
        entry.num_due and entry.request.needs_output
    ):
        return False
    return entry.computed == entry.num_tokens + entry.num_due - 1


def _missing_pages(entry: DecodeEntry, page_size: int) -> int:
    assert entry.pages is not None
    return max(0, pages_for_tokens(entry.computed + 1, page_size) - entry.pages.num_pages)
