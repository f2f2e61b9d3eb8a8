"""Decode pools that lie about one request: its response is right all the same, or its error is
named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protos import decode_pb2 as pb
from protos import transfer_pb2
from runtime.errors import BatonError, IncompatiblePeerError, IntegrityError
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
Terms = transfer_pb2.DestinationTerms


def _move(by: int) -> Callable[[pb.DecodeEvent], object]:
    return lambda event: setattr(event, "position", event.position + by)


TERMS: dict[str, Callable[[Terms], object]] = {
    "no session": setting("session_id", ""),
    "another session": setting("session_id", "0123456789abcdef"),
    "a long session": setting("session_id", "x" * 100_000),
    "a later epoch": setting("epoch", 1),
    "the latest epoch": setting("epoch", MOST),
    "other tags": setting("tag_base", 1),
    "another slot": setting("slot_id", MOST),
    "no plan": setting("plan_digest", ""),
    "another plan": setting("plan_digest", "0" * 32),
    "no key": setting("key", b""),
    "a short key": setting("key", b"short"),
    "a draft that the source has not": setting("with_draft", 1),
    "part of a page held": setting("held_tokens", 1),
    "everything held": setting("held_tokens", 208),
    "a page held": setting("held_tokens", 16),
    "in place": setting("in_place", 1),
    "a page out of range": lambda terms: terms.page_ids.__setitem__(0, MOST),
    "page zero": lambda terms: terms.page_ids.__setitem__(0, 0),
    "a page twice": lambda terms: terms.page_ids.__setitem__(1, terms.page_ids[0]),
    "pages in another order": lambda terms: terms.page_ids.reverse(),
    "a page missing": lambda terms: terms.page_ids.pop(),
    "many pages": lambda terms: terms.page_ids.extend(range(500_000)),
    "no stages": lambda terms: terms.stages.clear(),
    "half of the layers": setting_stage("end_layer", 2),
    "a reversed range of layers": setting_stage("first_layer", 9),
    "many stages": lambda terms: terms.stages.extend([terms.stages[0]] * 20_000),
    "many ranks": setting_stage("tensor_size", 1 << 31),
    "a garbled address": setting_stage("address", b"nowhere" * 9),
    "another process": setting_stage("incarnation", "0" * 16),
}
EVENTS: dict[str, Lie] = {
    "no terms": instead_of("destination"),
    "terms twice": instead_of("destination", "same", "same"),
    "an event of no kind": instead_of("destination", "none"),
    "it commits at once": instead_of("destination", "same", "committed"),
    "it reserves nothing and commits": instead_of("destination", "committed"),
    "it computes what it was not asked to": instead_of("destination", "local"),
    "it ends at once": instead_of("destination", "ended"),
    "it finishes at once": instead_of("destination", "finished"),
    "it draws before it has the prompt": instead_of("destination", "same", "tokens"),
    "it commits twice": instead_of("committed", "same", "same"),
    "it commits elsewhere": instead_of("committed", "same", then=_move(1)),
    "tokens are lost": instead_of("tokens"),
    "tokens come twice": instead_of("tokens", "same", "same"),
    "tokens skip one": instead_of("tokens", "same", then=_move(1)),
    "tokens go back": instead_of("tokens", "same", then=_move(-1)),
    "it finishes elsewhere": instead_of("finished", "same", then=_move(-1)),
    "it finishes twice": instead_of("finished", "same", "same"),
    "it goes on after the end": instead_of("finished", "same", "tokens"),
}
FAILING: dict[str, tuple[Lie, type[BatonError]]] = {
    "another key": (with_terms(setting("key", bytes(32))), IntegrityError),
    "terms that are always wrong": (
        with_terms(setting("slot_id", MOST)),
        IncompatiblePeerError,
    ),
}


async def test_a_pool_that_lies_changes_no_answer(tmp_path: Path) -> None:
    """One cluster meets all lies. On leaving it, nothing is leased."""
    lies = EVENTS | {name: with_terms(change) for name, change in TERMS.items()}
    async with attacked_cluster(tmp_path, "decode") as attacked:
        await attacked.check_harmless(lies)


@pytest.mark.parametrize("name", FAILING)
async def test_what_cannot_be_mended_is_named(name: str, tmp_path: Path) -> None:
    lie, kind = FAILING[name]
    async with attacked_cluster(tmp_path, "decode") as attacked:
        tokens, error = await attacked.ask(Liar(lie, always=True), timeout_s=8)
        assert isinstance(error, kind), error
        assert tokens == attacked.right[: len(tokens)]
        assert await attacked.ask(Attack(), timeout_s=8) == (attacked.right, None)
