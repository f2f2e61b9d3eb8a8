"""Pools are paired only if their bytes mean the same, and every mismatch has a reason."""

from dataclasses import replace
from typing import Any

import pytest

from engine.memory.layout import CacheKind, CacheSpec
from runtime.digests import check_compatible
from runtime.errors import IncompatiblePeerError
from tests.support.transfer.handoff import hybrid_specs
from transfer.plan.compatibility import check_settings, compatibility

SPECS = hybrid_specs(4)
MINE = compatibility(revision="abcdef0123456789", specs=SPECS, page_size=4)


def test_order_of_specs_does_not_matter() -> None:
    check_compatible(
        compatibility(revision="abcdef0123456789", specs=SPECS[::-1], page_size=4),
        MINE.digest,
        MINE.text,
    )


@pytest.mark.parametrize(
    ("revision", "specs", "page_size"),
    [
        ("other", SPECS, 4),
        ("abcdef0123456789", SPECS, 8),
        ("abcdef0123456789", SPECS[:-1], 4),
        ("abcdef0123456789", (replace(SPECS[0], dtype="float16"), *SPECS[1:]), 4),
        ("abcdef0123456789", (replace(SPECS[0], record_shape=(24, 3)), *SPECS[1:]), 4),
        ("abcdef0123456789", (*SPECS, CacheSpec(9, CacheKind.LATENT, (4, 8), "bfloat16", 2)), 4),
    ],
)
def test_every_difference_is_reported(
    revision: str, specs: tuple[CacheSpec, ...], page_size: int
) -> None:
    theirs = compatibility(revision=revision, specs=specs, page_size=page_size)
    with pytest.raises(IncompatiblePeerError) as caught:
        check_compatible(MINE, theirs.digest, theirs.text)
    assert MINE.text in str(caught.value)
    assert theirs.text in str(caught.value)
    assert MINE.text != theirs.text


def test_unused_index_keys_are_not_compared_s2_10() -> None:
    """A pool that keeps them for layers that share their selection fits one that leaves them
    out."""
    index_keys = CacheSpec(2, CacheKind.INDEX_KEY, (4, 16), "bfloat16", 2)
    roomy = (*SPECS, replace(index_keys, travels=False))
    assert compatibility(revision="abcdef0123456789", specs=roomy, page_size=4) == MINE
    needed = compatibility(revision="abcdef0123456789", specs=(*SPECS, index_keys), page_size=4)
    with pytest.raises(IncompatiblePeerError, match="index_key"):
        check_compatible(MINE, needed.digest, needed.text)


def test_a_pool_without_the_draft_pairs() -> None:
    kv = CacheSpec(4, CacheKind.KV, (2, 2, 4, 8), "bfloat16", 2, of_draft=True)
    first, narrow, other = (
        compatibility(
            revision="abcdef0123456789", specs=(*SPECS, spec), page_size=4, draft_revision=weights
        )
        for spec, weights in (
            (kv, "d1"),
            (replace(kv, record_shape=(2, 1, 4, 8)), "d1"),
            (kv, "d2"),
        )
    )
    for drafting in (first, narrow, other):
        check_compatible(MINE, drafting.digest, drafting.text)
        check_compatible(drafting, MINE.digest, MINE.text)
    for peer, says in (
        (narrow, r"draft d1, its layers 4: kv \(2, 1, 4, 8\)"),
        (other, r"differ in draft \(d1 here, d2 there\)"),
    ):
        with pytest.raises(IncompatiblePeerError, match=says):
            check_compatible(first, peer.digest, peer.text)


def test_drafts_of_other_widths_are_named_by_the_setting_they_come_from() -> None:
    chains, trees = (
        compatibility(
            revision="abcdef0123456789",
            page_size=4,
            draft_revision="d1",
            specs=(*SPECS, CacheSpec(4, CacheKind.TOPK_P, (topk,), "float32", 4, of_draft=True)),
        )
        for topk in (1, 3)
    )
    with pytest.raises(
        IncompatiblePeerError, match=r"pools differ in spec topk \(1 here, 3 there\): here schema"
    ):
        check_compatible(chains, trees.digest, trees.text)
    fast = compatibility(revision="abcdef0123456789", specs=SPECS, page_size=4, numerics="fast")
    with pytest.raises(
        IncompatiblePeerError, match=r"differ in numerics \(exact here, fast there\): here"
    ):
        check_compatible(trees, fast.digest, fast.text)  # which has no draft, and need not


@pytest.mark.parametrize(
    ("kind", "shard"),
    [(CacheKind.CONV, (3, 12)), (CacheKind.STATE, (1, 8, 8)), (CacheKind.KV, (2, 1, 4, 8))],
)
def test_a_pool_of_tensor_parallel_shards_is_refused_s4_8(
    kind: CacheKind, shard: tuple[int, ...]
) -> None:
    """No pool splits heads or channels between processes yet; one that did would be refused, and
    nothing re-sliced."""
    sharded = tuple(
        replace(spec, record_shape=shard) if spec.kind is kind else spec for spec in SPECS
    )
    theirs = compatibility(revision="abcdef0123456789", specs=sharded, page_size=4)
    with pytest.raises(IncompatiblePeerError) as caught:
        check_compatible(MINE, theirs.digest, theirs.text)
    assert f"{kind} {shard}" in str(caught.value)


def test_the_text_groups_equal_layers() -> None:
    assert MINE.text == (
        "schema 8, config unknown, weights abcdef012345, kept as model, numerics exact, arithmetic any, page size 4, "
        "max context the model's, "
        "layers 0,2: conv (3, 24) bfloat16 + state (2, 8, 8) float32; "
        "layers 1,3: kv (2, 2, 4, 8) bfloat16"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"numerics": "fast"}, r"differ in numerics \(exact here, fast there\)"),
        ({"weights": "int8"}, r"differ in kept as \(model here, int8 there\)"),
        ({"arithmetic": "2-pairs"}, r"differ in arithmetic \(any here, 2-pairs there\)"),
        ({"revision": "fedcba"}, r"differ in weights \(abcdef012345 here, fedcba there\)"),
        ({"max_context": "4096"}, r"differ in max context \(the model's here, 4096 there\)"),
        (
            {"page_size": 8, "numerics": "fast"},
            r"differ in numerics \(exact here, fast there\), page size \(4 here, 8 there\)",
        ),
    ],
)
def test_the_setting_and_both_values_are_named(change: dict[str, Any], named: str) -> None:
    theirs = compatibility(
        **{"revision": "abcdef0123456789", "specs": SPECS, "page_size": 4, **change}
    )
    with pytest.raises(IncompatiblePeerError, match=named):
        check_compatible(MINE, theirs.digest, theirs.text)


def test_settings_of_stages_are_named_with_both_values() -> None:
    mine = {"numerics": "exact", "num_pages": "40"}
    check_settings(mine, dict(mine))
    with pytest.raises(
        IncompatiblePeerError,
        match="num_pages is 40 here, 39 there; numerics is exact here, fast there",
    ):
        check_settings(mine, {"numerics": "fast", "num_pages": "39"})
    with pytest.raises(IncompatiblePeerError, match="draft is not set here, abc there"):
        check_settings(mine, {**mine, "draft": "abc"})
