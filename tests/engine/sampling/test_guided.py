"""Sampling under a grammar: allowed tokens, drafted tokens, and grammars that cannot be
followed."""

import itertools
import re
import signal
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.core.batch import ForwardMode, OutputOpening, OutputRow, SamplingRow
from engine.core.draft_trees import SpecRow, node_depths
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import Row, build_batch
from engine.sampling import guided
from engine.sampling.guided import GuidedSampler
from engine.sampling.sampler import sample
from engine.speculative.contracts.verify import sample_runs, sampling_at
from runtime.errors import InternalError, InvalidRequestError, StalledError
from runtime.grammar import (
    Grammar,
    GrammarKind,
    Grammars,
    GuidedText,
    MaskJob,
    checking,
    load_grammars,
)
from runtime.grammar.messages import TextCall
from runtime.grammar.process import GrammarProcess
from tests.support.models.grammars import LONG_S, allowed_after, fresh_after, wait_long_for_masks
from tests.support.models.guided import EOS, VOCAB_SIZE, spelled, write_character_tokenizer


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long_for_masks(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(folder)
    return folder


class CheckedGrammars(Grammars):
    """Grammars that are compiled when their text is opened, as `check` leaves them before a request
    begins."""

    def open(self, grammar: Grammar) -> GuidedText:
        text = super().open(grammar)
        futures.wait([self._processes[grammar].compiled], LONG_S)
        return text


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    loaded = CheckedGrammars(folder / "tokenizer.json", (EOS,))
    yield loaded
    loaded.close()


def regex(text: str) -> Grammar:
    return Grammar.of(GrammarKind.REGEX, text)


def after(grammars: Grammars, grammar: Grammar, text: str) -> str:
    """Return the allowed next characters; $ for the end."""
    allowed = np.flatnonzero(fresh_after(grammars, grammar, spelled(text))).tolist()
    return "".join(sorted("$" if token == EOS else chr(token) for token in allowed))


@pytest.mark.parametrize(
    ("text", "expected"), [("", "ab"), ("a", "ab"), ("ab", "12"), ("ab1", "$12"), ("b", "12")]
)
def test_allowed_tokens_follow_the_expression(grammars: Grammars, text: str, expected: str) -> None:
    assert after(grammars, regex("a*b[12]+"), text) == expected


def test_a_schema_allows_completing_tokens(grammars: Grammars) -> None:
    schema = Grammar.of(
        GrammarKind.JSON_SCHEMA,
        '{"enum": ["xy", 7, null], "x-guidance": {"whitespace_flexible": false}}',
    )
    assert after(grammars, schema, "") == '"7n'
    assert after(grammars, schema, '"x') == "y"
    assert after(grammars, schema, "null") == "$"


def test_whitespace_of_json_has_an_end(grammars: Grammars, folder: Path) -> None:
    schema = Grammar.of(GrammarKind.JSON_SCHEMA, '{"const": [1]}')
    # As byte-level BPE spells it.
    newline = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("\u010a")
    assert newline is not None
    start, text = ord("["), grammars.open(schema)
    for count in range(20):
        assert allowed_after(text, 0, (start, *[newline] * count))[newline], count
    assert np.flatnonzero(allowed_after(text, 0, (start, *[newline] * 20))).tolist() == [ord("1")]
    text.close()


def test_a_schema_can_do_without_whitespace(grammars: Grammars) -> None:
    schema = Grammar.of(
        GrammarKind.JSON_SCHEMA, '{"const": [1], "x-guidance": {"whitespace_flexible": false}}'
    )
    assert [after(grammars, schema, text) for text in ("", "[", "[1", "[1]")] == [
        "[",
        "1",
        "]",
        "$",
    ]


@pytest.mark.parametrize(
    "path", [("aab", "ab1", "", "b2"), ("ab12", "ab1", "ab12"), ("b2", "", "b2", "aab1", "aab2")]
)
def test_a_matcher_moved_back_and_forth_allows_the_same_tokens(
    grammars: Grammars, path: tuple[str, ...]
) -> None:
    """Back and forth, as when drafted tokens were not accepted or a request is replayed."""
    grammar = regex("a*b[12]+")
    moved, known = grammars.open(grammar), ""
    for text in path:
        kept = next(
            (at for at, pair in enumerate(zip(known, text, strict=False)) if pair[0] != pair[1]),
            min(len(known), len(text)),
        )
        found = allowed_after(moved, kept, spelled(text[kept:]))
        assert np.array_equal(found, fresh_after(grammars, grammar, spelled(text))), text
        known = text
    moved.close()


def row(
    grammar: Grammar, seed: int, text: str = "", *, temperature: float = 1.0, top_p: float = 1.0
) -> SamplingRow:
    return SamplingRow(
        SamplingParams(temperature=temperature, top_p=top_p, seed=seed),
        position=len(text),
        output=OutputRow(seed, 0, spelled(text), OutputOpening(grammar=grammar)),
    )


def position_logits(position: int) -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(position))


def generate(grammars: Grammars, grammar: Grammar, seed: int) -> str:
    """Sample until the end from logits that depend on the position alone."""
    sampler, at, text = GuidedSampler(grammars), row(grammar, seed), ""
    for position in range(64):
        (token,) = sampler(position_logits(position), [at])
        if token.token_id == EOS:
            return text
        text += chr(token.token_id)
        at = sampling_at(at, [token.token_id])
    raise AssertionError(f"no end: {text}")


@pytest.mark.parametrize("seed", range(8))
def test_every_sample_matches(grammars: Grammars, seed: int) -> None:
    pattern = "(cat|dog)-[0-9]{2,4}(\\.[a-f]+)?"
    assert re.fullmatch(pattern, generate(grammars, regex(pattern), seed))


def test_samples_follow_the_distribution_masked_by_the_grammar(grammars: Grammars) -> None:
    """Banning every other token by hand gives the same token and the same logprobs."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    allowed = {ord("x"), ord("y"), ord("z")}
    for seed, temperature in itertools.product(range(10), (0.0, 0.7)):
        guided = replace(
            row(regex("[xyz]"), seed, temperature=temperature, top_p=0.9), num_top_logprobs=2
        )
        by_hand = replace(
            guided,
            output=None,
            banned_token_ids=tuple(token for token in range(VOCAB_SIZE) if token not in allowed),
        )
        assert GuidedSampler(grammars)(logits, [guided]) == sample(logits, [by_hand])


@pytest.mark.parametrize("seed", range(6))
def test_trees_are_walked_along_the_grammar(grammars: Grammars, seed: int) -> None:
    """A tree with the right continuation and, at every node, a token the grammar forbids: what is
    drawn is what plain decoding draws, and the matcher that was left in the tree serves the next
    step."""
    grammar, sampler = regex("(cat|dog)-[0-9]{2,4}(\\.[a-f]+)?"), GuidedSampler(grammars)
    plain = [*spelled(generate(grammars, grammar, seed)), EOS]
    tokens, parents, known = [0], [-1], 0
    for token in plain[:4]:
        tokens += [ord("~"), token]
        parents += [known, known]
        known = len(tokens) - 1
    depths = node_depths(tuple(parents))
    at = row(grammar, seed)
    batch = build_batch(
        ForwardMode.VERIFY, [Row(1, tokens, 0, [1], 0, at, SpecRow(tuple(parents)))]
    )
    logits = torch.cat([position_logits(depth) for depth in depths])
    (run,) = sample_runs(logits, batch, sampler)
    assert [token.token_id for token in run.tokens] == plain[:5]
    (after_tree,) = sampler(position_logits(2), [sampling_at(at, plain[:2])])
    assert after_tree.token_id == plain[2], "back to where fewer tokens were kept"


@pytest.mark.parametrize(
    ("grammar", "known", "drafted"),
    [
        ("(yes|no|maybe)", "ye", "s$"),
        ("(yes|no|maybe)", "ye", "s$$"),
        ("[0-9]{4}-[0-9]{2}", "2024-1", "2$"),
        ("x{0,3}", "x", "$x"),
        ("x{0,3}", "x", "xx$x"),
        ('"[a-z]*"', '"a', '"$'),
    ],
)
def test_an_end_that_was_only_drafted_changes_nothing(
    grammars: Grammars, grammar: str, known: str, drafted: str
) -> None:
    """After a complete grammar only the end is allowed, so good drafts contain it."""
    tokens = [EOS if token == ord("$") else token for token in spelled(drafted)]
    text = grammars.open(regex(grammar))
    for count in range(len(known), -1, -1):
        job = text.ask(0, spelled(known), (0, *tokens), range(-1, len(tokens)))
        assert job.wait(time.monotonic() + LONG_S)
        assert job.problem == ""
        assert np.array_equal(
            allowed_after(text, count, ()),
            fresh_after(grammars, regex(grammar), spelled(known[:count])),
        )
    text.close()


@pytest.mark.parametrize(
    ("pattern", "known", "forced"),
    [
        ("(cat|dog)-[0-9]{2}!", "", ""),
        ("(cat|dog)-[0-9]{2}!", "c", "at-"),
        ("(cat|dog)-[0-9]{2}!", "cat-12", "!$"),
        ("yes", "", "yes$"),
        ("a{40}", "a", "a" * 9),
        ("yes", "yes$", ""),
    ],
)
def test_the_only_continuation_is_known_with_the_mask(
    grammars: Grammars, pattern: str, known: str, forced: str
) -> None:
    text = grammars.open(regex(pattern))
    job = text.ask(0, ended(known), num_forced=9)
    assert job.wait(time.monotonic() + LONG_S)
    assert job.forced.get((), ()) == ended(forced)
    assert np.array_equal(
        allowed_after(text, len(known), ()), fresh_after(grammars, regex(pattern), ended(known))
    )
    text.close()


def ended(text: str) -> tuple[int, ...]:
    """Return the tokens of a text, with $ for the end."""
    return tuple(EOS if token == ord("$") else token for token in spelled(text))


def test_the_only_continuation_is_known_after_each_leaf(grammars: Grammars) -> None:
    """Leaves are left out after 5 ms of computing; the library is slower at first."""
    text = grammars.open(regex("x(cat|dog)-[0-9]"))
    for _ in range(50):
        # after x: c and a, o, which is forbidden, and d
        job = text.ask(0, spelled("x"), spelled("xcaod"), (-1, 0, 1, 0, 0), num_forced=9)
        assert job.wait(time.monotonic() + LONG_S)
        if len(job.forced) > 1:
            break
    assert job.forced == {spelled("ca"): spelled("t-"), spelled("d"): spelled("og-")}
    assert set(job.masks) == {(), spelled("c"), spelled("ca"), spelled("d")}
    text.close()


def test_forced_tokens_are_drafts_if_the_first_of_them_was_sampled(grammars: Grammars) -> None:
    sampler, at = GuidedSampler(grammars), row(regex("(cat|dog)-[0-9]"), 0, "c")
    batch = build_batch(
        ForwardMode.VERIFY, [Row(1, [99], 0, [1], 0, at, SpecRow((-1,), num_draft_tokens=5))]
    )
    sampler.prepare(batch)
    (token,) = sampler(position_logits(1), [at])
    assert token.token_id == ord("a")
    assert sampler.forced(at, [ord("a")]) == spelled("t-")
    assert sampler.forced(at, [ord("x")]) == ()
    assert sampler.forced(at, [*spelled("at")]) == ()
    assert sampler.forced(at, []) == ()
    assert sampler.forced(replace(at, output=None), [ord("a")]) == ()


def test_rows_without_a_grammar_are_sampled_as_before(grammars: Grammars) -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    free = SamplingRow(SamplingParams(temperature=0), position=0)
    mixed = GuidedSampler(grammars)(logits, [free, row(regex("q"), 0)])
    assert mixed == [sample(logits[:1], [free])[0], SampledToken(ord("q"))]


def test_tokens_after_the_end_are_ignored(grammars: Grammars) -> None:
    """A draft may continue after an end that was sampled in the same step."""
    ended = replace(
        row(regex("q"), 0),
        output=OutputRow(0, 0, (ord("q"), EOS), OutputOpening(grammar=regex("q"))),
    )
    (token,) = GuidedSampler(grammars)(torch.zeros(1, VOCAB_SIZE), [ended])
    assert token.problem == ""


def test_a_text_that_left_its_grammar_fails_alone(grammars: Grammars) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    wrong, right = GuidedSampler(grammars)(
        logits, [row(regex("ab"), 0, "ax"), row(regex("ab"), 1, "a")]
    )
    assert "cannot be followed beyond 1 tokens" in str(wrong.error)
    assert (right.token_id, right.error) == (ord("b"), None)


def test_masks_are_computed_during_the_forward(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `prepare` nothing is asked any more: neither at the root nor at the nodes that the
    grammar can reach."""
    grammar, sampler = regex("ab[0-9]+"), GuidedSampler(grammars)
    at = row(grammar, 11)
    tree = Row(
        1, [0, ord("a"), ord("b"), ord("7"), ord("~")], 0, [1], 0, at, SpecRow((-1, 0, 1, 2, 0))
    )
    batch = build_batch(ForwardMode.VERIFY, [tree])
    sampler.prepare(batch)
    asked = GuidedText.ask
    monkeypatch.setattr(
        GuidedText, "ask", lambda *given, **named: pytest.fail("asked behind the forward")
    )
    logits = torch.full((5, VOCAB_SIZE), -9.0)
    logits[0, ord("a")] = logits[1, ord("b")] = logits[2, ord("7")] = logits[3, ord("8")] = 50.0
    (run,) = sample_runs(logits, batch, sampler)
    assert "".join(chr(token.token_id) for token in run.tokens) == "ab78"
    monkeypatch.setattr(GuidedText, "ask", asked)
    sampler.reset()


def test_a_grammar_that_hangs_costs_the_others_of_its_batch_one_limit(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, hung = GuidedSampler(grammars), row(regex("xy"), 21)
    fine = row(regex("zy"), 22)
    sampler(torch.zeros(2, VOCAB_SIZE), [hung, fine])  # both are compiled
    monkeypatch.setattr(guided, "STEP_WAIT_S", 0.3)
    child = grammars._processes[regex("xy")]._child
    assert child is not None
    signal.pidfd_send_signal(child._pidfd, signal.SIGSTOP)
    batch = build_batch(
        ForwardMode.DECODE, [Row(21, [0], 0, [1], 0, hung), Row(22, [0], 0, [2], 0, fine)]
    )
    sampler.prepare(batch)
    failed, drawn = sampler(torch.zeros(2, VOCAB_SIZE), [hung, fine])
    assert isinstance(failed.error, StalledError)
    assert (
        "too busy to compute the next token of a grammar within 0.3 s of a step" in failed.problem
    )
    assert (drawn.token_id, drawn.problem) == (ord("z"), "")
    sampler.reset()


REFUSED = [
    (GrammarKind.REGEX, "(", "unclosed group"),
    (GrammarKind.REGEX, "a(?=b)", "look-around"),
    (GrammarKind.JSON_SCHEMA, "{", "is not JSON"),
    (GrammarKind.JSON_SCHEMA, "[1]", "must be a JSON object"),
    (GrammarKind.JSON_SCHEMA, '{"type": "frob"}', "frob"),
    (GrammarKind.JSON_SCHEMA, '{"not": {}}', "not"),
    (GrammarKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "nowhere"),
    (GrammarKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "unclosed group"),
    (GrammarKind.JSON_SCHEMA, '{"a":' * 60, "is not JSON"),
    (GrammarKind.JSON_SCHEMA, '{"const": 1e999}', "1e999 is not a finite number"),
    (GrammarKind.JSON_SCHEMA, '{"enum": [-Infinity]}', "-Infinity is not a finite number"),
    (GrammarKind.JSON_SCHEMA, '{"const": NaN}', "NaN is not a finite number"),
    (GrammarKind.JSON_SCHEMA, '{"a":' * 2000, "is nested 2000 deep, the limit is 64"),
]


@pytest.mark.parametrize(("kind", "text", "problem"), REFUSED, ids=map(str, range(len(REFUSED))))
async def test_an_invalid_grammar_is_refused_by_field(
    grammars: Grammars, kind: GrammarKind, text: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await grammars.check(Grammar.of(kind, text))
    (violation,) = refused.value.violations
    assert violation.field == f"structured_output.{kind}"
    assert problem in violation.description
    assert "\n" not in violation.description


def test_no_step_waits_for_a_grammar_to_compile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was dropped since it was checked, or has ended: the request goes on where it is
    checked again."""
    grammars = load_grammars(folder, (EOS,))
    assert grammars is not None
    monkeypatch.setattr(MaskJob, "wait", lambda *given: pytest.fail("the engine's thread waits"))
    sampler, other = GuidedSampler(grammars), replace(row(regex("q"), 31), output=None)
    dropped, fine = sampler(torch.zeros(2, VOCAB_SIZE), [row(regex("xy"), 30), other])
    assert isinstance(dropped.error, StalledError)
    assert "must be restarted" in dropped.problem
    assert fine.problem == ""
    futures.wait([grammars._processes[regex("xy")].compiled], LONG_S)
    monkeypatch.undo()
    wait_long_for_masks(monkeypatch)
    (drawn,) = sampler(torch.zeros(1, VOCAB_SIZE), [row(regex("xy"), 32)])
    assert drawn.token_id == ord("x"), "compiled meanwhile"
    grammars.close()


async def test_a_checked_grammar_is_kept_until_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for any number of other grammars within the limit."""
    monkeypatch.setattr(checking, "MAX_PROCESSES", 2)
    monkeypatch.setattr(checking, "MAX_EXPECTED", 6)
    grammars = load_grammars(folder, (EOS,))
    assert grammars is not None
    for number in range(6):
        await grammars.check(regex(f"a{{{number + 1}}}"))
    texts = [grammars.open(regex(f"a{{{number + 1}}}")) for number in range(6)]
    assert all(text.is_ready for text in texts)
    for text in texts:
        text.close()
    for number in range(9):
        await grammars.check(regex(f"b{{{number + 1}}}"))
    assert [grammar.text for grammar in grammars._processes] == [
        f"b{{{number}}}" for number in range(3, 10)
    ]
    monkeypatch.setattr(checking, "EXPECTED_S", 0.0)
    for number in range(3, 10):
        await grammars.check(regex(f"b{{{number}}}"))
        grammars.open(regex(f"b{{{number}}}")).close()
    await grammars.check(regex("c"))
    assert len(grammars._processes) == 2, "the others are not expected any more"
    grammars.close()


async def test_only_so_many_grammars_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "MAX_PROCESSES", 4)
    grammars = load_grammars(folder, (EOS,))
    assert grammars is not None
    used = grammars.open(regex("b"))
    for number in range(10):
        await grammars.check(regex(f"a{{{number + 1}}}"))
        grammars.open(regex(f"a{{{number + 1}}}")).close()
    assert len(grammars._processes) == 4
    assert np.flatnonzero(allowed_after(used, 0, ())).tolist() == [ord("b")], (
        "one that is in use stays"
    )
    assert after(grammars, regex("a{1}"), "") == "a", "one that was dropped is compiled again"
    grammars.close()


def test_a_model_without_a_tokenizer_offers_none(tmp_path: Path) -> None:
    assert load_grammars(tmp_path, (EOS,)) is None
    (token,) = GuidedSampler(None)(torch.zeros(1, VOCAB_SIZE), [row(regex("q"), 0)])
    assert isinstance(token.error, InternalError)
    write_character_tokenizer(tmp_path)
    assert load_grammars(tmp_path, ()) is None, "no text could end"
    assert load_grammars(tmp_path, (VOCAB_SIZE,)) is None


class CountedProcess:
    """A process that computes each mask in this many seconds, and those of a tree's further nodes
    for 5 ms at most."""

    def __init__(self, mask_s: float) -> None:
        self.num_texts, self.mask_s = 0, mask_s

    def submit(self, job: MaskJob | TextCall) -> None:
        if isinstance(job, MaskJob):
            further = min(len(job.call.tree_token_ids[1:]) * self.mask_s, 0.005 + self.mask_s)
            job.cpu_s = self.mask_s + further


@pytest.mark.parametrize("share", [1.0, 1 / 16])
@pytest.mark.parametrize("num_accepted", [0, 2, 5])
def test_drafts_end_no_text_that_plain_decoding_continues(num_accepted: int, share: float) -> None:
    """Masks take nearly what a step earns. Nodes that were drafted in vain took more than was left,
    after a while; now those that are reached are asked for one by one where little is left."""
    process = CountedProcess(0.95 * min(0.005, share * 0.04))
    text = GuidedText(cast(GrammarProcess, process), 1)
    for _ in range(1000):
        job = text.ask(0, (7,), (7, 1, 2, 3, 4, 5), range(-1, 5), share=share, num_forced=6)
        assert bool(job.call.num_forced) == (len(job.call.tree_token_ids) > 1)
        for _ in range(0 if len(job.call.tree_token_ids) > 1 else num_accepted):
            text.ask(0, (7,), share=share)
    process.mask_s = 1.0
    text.ask(0, (7,), share=share)
    with pytest.raises(InvalidRequestError, match="more computing than the limit"):
        text.ask(0, (7,), share=share)
