"""Who takes the step after the one under way, before its tokens are known: all that would take it
then, or nobody.

A row of that step brings what is known without the token: its position, its pages, how the next one
is drawn. Where anything else depends on the result, the pool waits for it, as it would without a
step ahead:

    a prompt or a replay is to be read        it may end in a batch with others
    a preempted request waits                 for pages that the result may free
    pages are short                           who gives its own up is decided with nothing in flight
    penalties count the token, or a grammar   its mask follows from the token

Belongs to the engine thread.
"""

from collections.abc import Sequence

from decode.entry import DecodeEntry, DecodeLimits
from engine.memory.leases import PageAllocator, pages_for_tokens


def lease_ahead(
    turns: Sequence[DecodeEntry], limits: DecodeLimits, pages: PageAllocator
) -> list[DecodeEntry]:
    """Of `turns`, the running requests in the order of their turns, those that take the step; each
    then has a page for its token. None where the step cannot be prepared, and nothing is leased
    then."""
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
    """Whether its prompt, and all of its tokens but the newest, which may be due, are computed or
    in flight."""
    if entry.computed < len(entry.request.prompt_token_ids) or (
        entry.num_due and entry.request.needs_output
    ):
        return False
    return entry.computed == entry.num_tokens + entry.num_due - 1


def _missing_pages(entry: DecodeEntry, page_size: int) -> int:
    assert entry.pages is not None
    return max(0, pages_for_tokens(entry.computed + 1, page_size) - entry.pages.num_pages)
