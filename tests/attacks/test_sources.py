"""Prefill workers that lie about one request: its response is right all the same, or its error is
named."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protos import prefill_pb2 as pb
from protos import transfer_pb2
from runtime.errors import DeadlineError, HandoffError
from tests.support.cluster.in_the_middle import (
    Attack,
    Liar,
    Lie,
    attacked_cluster,
    instead_of,
    setting,
    setting_stage,
    with_terms,
)

MOST = 2**32 - 1
Terms = transfer_pb2.SourceTerms


def _tokens(event: pb.PrefillEvent, *token_ids: int) -> None:
    event.first_token.token.token_ids[:] = token_ids


def _of_unknown_requests(event: pb.PrefillEvent) -> Sequence[pb.PrefillEvent]:
    keys = (0, 2**64 - 1, event.key + 1)
    return (*(pb.PrefillEvent(key=key, sent=pb.PrefillSent()) for key in keys), event)


TERMS: dict[str, Callable[[Terms], object]] = {
    "fewer tokens": setting("num_tokens", 199),
    "more tokens": setting("num_tokens", 201),
    "most tokens": setting("num_tokens", MOST),
    "no tokens": setting("num_tokens", 0),
    "no page size": setting("page_size", 0),
    "another page size": setting("page_size", 32),
    "no chunks": setting("chunk_tokens", 0),
    "odd chunks": setting("chunk_tokens", 7),
    "another slot": setting("slot_id", MOST),
    "all is sent": setting("sends_rest", 0),
    "a loan": setting("is_loan", 1),
    "in place": setting("request_key", 1),
    "a page out of range": lambda terms: terms.page_ids.__setitem__(0, MOST),
    "page zero": lambda terms: terms.page_ids.__setitem__(0, 0),
    "a page twice": lambda terms: terms.page_ids.__setitem__(1, terms.page_ids[0]),
    "pages in another order": lambda terms: terms.page_ids.reverse(),
    "a page missing": lambda terms: terms.page_ids.pop(),
    "a page too many": lambda terms: terms.page_ids.append(99),
    "many pages": lambda terms: terms.page_ids.extend(range(500_000)),
    "no stages": lambda terms: terms.stages.clear(),
    "half of the layers": setting_stage("end_layer", 2),
    "a reversed range of layers": setting_stage("first_layer", 9),
    "all layers twice": lambda terms: terms.stages.append(terms.stages[0]),
    "many stages": lambda terms: terms.stages.extend([terms.stages[0]] * 20_000),
    "many ranks": setting_stage("tensor_size", 1 << 31),
    "a rank outside": setting_stage("tensor_rank", 5),
    "a garbled address": setting_stage("address", b"nowhere" * 9),
    "no address": setting_stage("address", b""),
    "another process": setting_stage("incarnation", "0" * 16),
    "another model": lambda terms: setattr(terms, "compatibility", "0" * 32),
    "no model": lambda terms: setattr(terms, "compatibility", ""),
    "another draft": lambda terms: setattr(terms, "compatibility", terms.compatibility + "+0"),
    "a long text": lambda terms: setattr(terms, "compatibility_text", "x" * 3_000_000),
    "other content": lambda terms: setattr(terms, "content", bytes(16)),
    "no content": lambda terms: setattr(terms, "content", b""),
}
EVENTS: dict[str, Lie] = {
    "it does not start": instead_of("started"),
    "it starts twice": instead_of("started", "same", "same"),
    "no terms": instead_of("started", "same", then=lambda event: event.started.ClearField("terms")),
    "it has sent before it knows where to": instead_of("started", "same", "sent"),
    "an event of no kind": instead_of("started", "same", "none"),
    "it ends at once": instead_of("started", "same", "ended"),
    "it ends twice": instead_of("started", "ended", "ended"),
    "events of unknown requests": _of_unknown_requests,
    "more cached than the prompt has": instead_of(
        "started",
        "same",
        then=lambda event: setattr(event.started, "cached_tokens", MOST),
    ),
    "no token": instead_of("first_token", "same", then=_tokens),
    "two tokens": instead_of("first_token", "same", then=lambda event: _tokens(event, 5, 6)),
    "the first token twice": instead_of("first_token", "same", "same"),
    "it reports the sending twice": instead_of("sent", "same", "same"),
    "it does not report the sending": instead_of("sent"),
    "it starts after the end": instead_of("sent", "same", "started"),
}
FAILING: dict[str, tuple[Lie, type[Exception]]] = {
    "an unknown token": (
        instead_of("first_token", "same", then=lambda event: _tokens(event, MOST)),
        HandoffError,
    ),
    "no first token": (instead_of("first_token"), DeadlineError),
}


async def test_a_source_that_lies_changes_no_answer(tmp_path: Path) -> None:
    """One cluster meets all lies. On leaving it, nothing is leased."""
    lies = EVENTS | {name: with_terms(change) for name, change in TERMS.items()}
    async with attacked_cluster(tmp_path, "prefill") as attacked:
        await attacked.check_harmless(lies)


@pytest.mark.parametrize("name", FAILING)
async def test_what_cannot_be_mended_is_named(name: str, tmp_path: Path) -> None:
    lie, kind = FAILING[name]
    async with attacked_cluster(tmp_path, "prefill") as attacked:
        source = Liar(lie)
        tokens, error = await attacked.ask(source, timeout_s=3)
        assert isinstance(error, kind), error
        assert len(tokens) <= 1
        assert await attacked.ask(Attack(), timeout_s=8) == (attacked.right, None)
