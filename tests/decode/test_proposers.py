"""Which of a pool's proposers drafts for a request, and when its draft model grows no tree."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from decode.draft_costs import DraftCosts
from decode.entry import DecodeEntry, DecodeLimits
from decode.proposers import MAX_PROBES, PROBE_STEPS, Proposers
from engine.core.draft_trees import NO_TREE, TokenTree
from engine.core.request import Request
from engine.memory.leases import SlotAllocator
from engine.speculative.contracts.config import Proposer

MOST = 5


@dataclass
class Steps:
    """The drafts that were verified, by proposer, and the steps for which the model grew none."""

    drafted: dict[str, int]
    accepted: dict[str, int]
    num_steps: int = 0
    num_ungrown: int = 0
    num_left: int = 0  # steps that the model did not follow


def limits(proposers: tuple[Proposer, ...], *, adapts: bool) -> DecodeLimits:
    return DecodeLimits(
        page_size=16,
        grid=1,
        depth=1,
        max_running=4,
        max_context_tokens=4096,
        num_draft_tokens=MOST,
        proposers=proposers,
        adapts=adapts,
    )


def generate(
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    right: float | Callable[[int], float],
    proposers: tuple[Proposer, ...] = ("model", "suffix"),
    forced: frozenset[int] = frozenset(),
    grown: int | None = MOST,
    speculates: bool = True,
    adapts: bool = False,
) -> Steps:
    """Generate the answer with a draft model of which each token is right with probability `right`,
    which may depend on the number of output tokens.

    A grammar forces the rest of the answer's chain after as many tokens as are in `forced`.
    """
    rng = random.Random(0)
    request = Request("r", tuple(prompt), len(answer), speculates=speculates)
    entry = DecodeEntry(key=1, request=request, emit=lambda event: None)
    entry.lease_scratch(SlotAllocator(4))
    chosen = Proposers(limits(proposers, adapts=adapts), DraftCosts(), lambda entry: grown)
    steps = Steps(dict.fromkeys(("model", "grammar", "suffix"), 0), {})
    steps.accepted = dict(steps.drafted)
    grows = 0
    while len(entry.outputs) < len(answer):
        share = right if isinstance(right, float) else right(len(entry.outputs))
        ahead = [token if rng.random() < share else -1 for token in answer[len(entry.outputs) :]]
        is_forced = len(entry.outputs) in forced
        token_ids = tuple(answer[len(entry.outputs) :][:3] if is_forced else ahead[:grows])
        entry.draft.tree, entry.draft.is_forced = TokenTree.chain(token_ids), is_forced
        asked = chosen.propose(entry)
        grows = asked or 0
        drafted, entry.draft.tree = entry.draft.tree.token_ids, NO_TREE
        accepted = 0
        for token, actual in zip(drafted, answer[len(entry.outputs) :], strict=False):
            if token != actual:
                break
            accepted += 1
        steps.drafted[entry.draft.proposer] += len(drafted)
        steps.accepted[entry.draft.proposer] += accepted
        steps.num_steps += 1
        steps.num_ungrown += asked == 0
        steps.num_left += asked is None
        entry.outputs += answer[len(entry.outputs) :][: accepted + 1]
    return steps


def novel(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]


COPIED = novel(400)


def test_a_text_that_repeats_is_copied_and_the_model_rests() -> None:
    steps = generate(COPIED, COPIED[50:350], right=0.7)
    assert steps.drafted["suffix"] > 10 * steps.drafted["model"]
    assert steps.num_steps < 300 / MOST
    assert steps.num_ungrown > 0.8 * steps.num_steps


def test_other_text_is_drafted_by_the_model() -> None:
    steps = generate(COPIED, novel(300, seed=2), right=0.7)
    assert steps.drafted["suffix"] == 0
    assert steps.num_ungrown == 0
    assert steps.accepted["model"] / steps.num_steps > 1.5


@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
def test_both_need_no_more_steps_than_the_better_of_them(right: float) -> None:
    """The answer has new text, copies with changes, and repetition of itself."""
    rng = random.Random(3)
    changed = [token if rng.random() < 0.9 else 50_001 for token in COPIED[:150]]
    answer = [*novel(150, seed=4), *changed, *novel(50, seed=5) * 4, *novel(100, seed=6)]
    needed = {
        proposers: generate(COPIED, answer, right=right, proposers=proposers).num_steps
        for proposers in ((("model",), ("suffix",), ("model", "suffix")))
    }
    both = needed.pop(("model", "suffix"))
    assert both <= 1.02 * min(needed.values())
    if right == 0.5:
        assert both < 0.8 * min(needed.values())


def test_a_model_that_is_surer_keeps_a_text_that_repeats() -> None:
    """Matches of two tokens, each with another continuation."""
    places = list(range(200))
    text = []
    for seed in range(2):
        random.Random(seed).shuffle(places)
        text.append(
            [token for place in places for token in (place, place + 500, 9000 * seed + place)]
        )
    steps = generate(text[0], text[1], right=0.95)
    assert steps.drafted["suffix"] < 0.05 * steps.drafted["model"]


def test_what_a_grammar_forces_is_never_replaced() -> None:
    forced = frozenset(range(0, 300, 7))
    steps = generate(COPIED, COPIED[50:350], right=0.7, forced=forced)
    assert steps.accepted["grammar"] == steps.drafted["grammar"] > 0
    assert steps.drafted["suffix"] > 0
    assert generate(COPIED, novel(50), right=0.7, forced=forced).drafted["grammar"] > 0
    alone = generate(COPIED, COPIED[50:350], right=0.7, forced=forced, proposers=("suffix",))
    assert alone.accepted["grammar"] == alone.drafted["grammar"] > 0
    assert alone.drafted["model"] == 0


@pytest.mark.parametrize("grown", [None, 0])
def test_a_text_is_drafted_though_the_model_is_not(grown: int | None) -> None:
    steps = generate(COPIED, COPIED[50:350], right=0.7, grown=grown)
    assert steps.drafted["model"] == 0
    assert steps.num_steps < 300 / MOST
    assert steps.num_ungrown == (steps.num_steps if grown == 0 else 0)


@pytest.mark.parametrize("proposers", [("model",), ("model", "suffix")])
def test_a_model_that_is_wrong_rests_but_for_probes_and_leaves(
    proposers: tuple[Proposer, ...],
) -> None:
    answer = novel(400, seed=7)
    steps = generate(COPIED, answer, right=0.05, proposers=proposers, adapts=True)
    assert steps.num_ungrown == MAX_PROBES * (PROBE_STEPS - 1)
    assert steps.num_left > 0.7 * steps.num_steps
    fixed = generate(COPIED, answer, right=0.05, proposers=proposers)
    assert fixed.num_ungrown == fixed.num_left == 0
    right = generate(COPIED, answer, right=0.8, proposers=proposers, adapts=True)
    assert right.num_ungrown == 0


def test_a_model_that_becomes_right_is_noticed() -> None:
    def right(num_outputs: int) -> float:
        return 0.9 if num_outputs > 40 else 0.0

    answer = novel(800, seed=8)
    steps = generate(COPIED, answer, right=right, proposers=("model",), adapts=True)
    assert PROBE_STEPS < steps.num_ungrown < MAX_PROBES * PROBE_STEPS
    assert steps.num_left == 0
    assert steps.num_steps < MAX_PROBES * PROBE_STEPS + 800 / 2.5


def test_a_request_that_declines_drafts_has_none() -> None:
    steps = generate(COPIED, COPIED[50:350], right=0.7, grown=None, speculates=False)
    assert sum(steps.drafted.values()) == 0
