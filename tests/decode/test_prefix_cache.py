"""What one request leaves on a decode pool for the next, on the real scheduler with a memory that
remembers tokens."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, invariant, rule

from decode.entry import DecodeEntryEvent, DecodeLimits, Finished, Generated
from decode.request_memory import Reservation
from decode.scheduler import DecodeScheduler
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import AcceptedNodes, TokenTree, Verified
from engine.core.request import Request, SampledToken, SamplingParams
from engine.memory.leases import PageAllocator, SlotAllocator
from engine.pipeline.results import StepFailed, StepResult
from pool.prefix.tree import ResumeRule
from runtime.clock import ManualClock
from runtime.digests import block_names
from runtime.errors import CapacityError, PeerLostError
from tests.support.pool.cache_rig import CacheMachine, CacheRig

PAGE = 4


def generated_after(tokens: Sequence[int]) -> int:
    """The token that a greedy model draws: one function of all before it."""
    return (sum(tokens) * 31 + len(tokens)) % 3


@dataclass
class Asked:
    """A request, and what became of it."""

    request: Request
    reservation: Reservation
    num_known: int = 1  # tokens of the answer that this pool does not draw
    events: list[DecodeEntryEvent] = field(default_factory=list)
    has_joined: bool = False

    @property
    def tokens(self) -> list[int]:
        """The prompt, and as many tokens as it may draw."""
        tokens = list(self.request.prompt_token_ids)
        for _ in range(self.request.max_tokens):
            tokens.append(generated_after(tokens))
        return tokens

    @property
    def expected(self) -> list[int]:
        """What is to be drawn here, up to a stop token."""
        answer = self.tokens[len(self.request.prompt_token_ids) :]
        ends = [
            place + 1 for place, token in enumerate(answer) if token in self.request.stop_token_ids
        ]
        return answer[self.num_known : min(ends, default=len(answer))]

    @property
    def drawn(self) -> list[int]:
        return [
            token.token_id
            for event in self.events
            if isinstance(event, Generated)
            for token in event.tokens
        ]

    @property
    def is_finished(self) -> bool:
        return any(isinstance(event, Finished) for event in self.events)


class Rig(CacheRig[DecodeScheduler]):
    """A scheduler over pages of four tokens, and what a source and a model do there. With a `grid`
    the model has recurrent layers, whose states come with the prompts."""

    def __init__(
        self,
        *,
        num_pages: int = 40,
        depth: int = 1,
        grid: int = 1,
        local_rest_tokens: int = 0,
        steps_ahead: bool = False,
    ) -> None:
        self.clock = ManualClock()
        super().__init__(
            DecodeScheduler(
                pages=PageAllocator(num_pages),
                slots=SlotAllocator(0 if grid == 1 else 9),
                clock=self.clock,
                cache_rule=ResumeRule(PAGE),
                limits=DecodeLimits(
                    page_size=PAGE,
                    grid=grid,
                    depth=depth,
                    max_running=4,
                    max_held=8,
                    chunk_tokens=8,
                    max_context_tokens=(num_pages - 1) * PAGE,
                    growth_tokens=PAGE,
                    local_rest_tokens=local_rest_tokens,
                    has_states=grid > 1,
                    steps_ahead=steps_ahead,
                ),
            ),
            PAGE,
        )
        self.asked: dict[int, Asked] = {}
        self.num_read = 0  # tokens, prompts' and replayed ones

    def tokens_of(self, key: int) -> Sequence[int]:
        return self.asked[key].tokens

    def on_row(self, key: int, context: int, count: int, *, draws: bool) -> None:
        is_step = draws and context >= len(self.asked[key].request.prompt_token_ids)
        self.num_read += 0 if is_step else count

    def end(self) -> None:
        for key in self.asked:
            self.scheduler.release(key)

    def reserve(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 5,
        salt: str = "",
        caches: bool = True,
        compatibility: str = "c",
        replayed: int = 0,
        stops: frozenset[int] = frozenset(),
    ) -> Asked:
        """`replayed` tokens after the first were drawn on another pool."""
        request = Request(
            "r",
            tuple(prompt),
            max_tokens,
            SamplingParams(temperature=0),
            cache_salt=salt,
            stop_token_ids=stops,
        )
        asked = Asked(request, Reservation(0, (), 0), 1 + replayed)
        blocks = block_names(prompt, PAGE, compatibility=compatibility, salt=salt) if caches else ()
        known = asked.tokens[len(prompt) + 1 : len(prompt) + 1 + replayed]
        asked.reservation = self.scheduler.reserve(
            request,
            asked.events.append,
            replayed=known,
            blocks=blocks,
            compatibility=compatibility if caches else "",
        )
        self.asked[asked.reservation.key] = asked
        self.memory.read(asked.reservation.prompt_page_ids, prompt[: asked.reservation.held_tokens])
        return asked

    def read_rest(self, prompt: Sequence[int], *, max_tokens: int = 5) -> Asked:
        """What is missing of the prompt is to be computed here."""
        request = Request("r", tuple(prompt), max_tokens, SamplingParams(temperature=0))
        asked = Asked(request, Reservation(0, (), 0), num_known=0, has_joined=True)
        asked.reservation = self.scheduler.read_rest(
            request,
            asked.events.append,
            blocks=block_names(prompt, PAGE, compatibility="c"),
            compatibility="c",
        )
        self.asked[asked.reservation.key] = asked
        return asked

    def land(self, asked: Asked) -> None:
        """What the destination does not hold arrives."""
        held, prompt = asked.reservation.held_tokens, asked.request.prompt_token_ids
        self.memory.write(asked.reservation.prompt_page_ids, held, prompt[held:], kept=self.kept)

    def join(self, asked: Asked, *, with_draft: bool = False) -> None:
        self.land(asked)
        asked.has_joined = True
        self.scheduler.join(
            asked.reservation.key,
            generated_after(asked.request.prompt_token_ids),
            with_draft=with_draft,
        )

    def answer(self, batch: ForwardBatch, error: StepFailed | None = None) -> None:
        ends = [
            context + count
            for context, count in zip(batch.context_lens, batch.query_lens, strict=True)
        ]
        if error is not None:
            self.spoil(batch)
        drawn = [
            SampledToken(self.asked[key].tokens[end])
            for key, end, sampling in zip(batch.request_keys, ends, batch.sampling, strict=True)
            if sampling is not None and error is None
        ]
        self.scheduler.on_result(batch, StepResult(0, drawn, error))

    def run(self) -> None:
        """Until nothing is left to do."""
        while (batch := self.launch()) is not None:
            self.answer(batch)

    def serve(self, prompt: Sequence[int], **options: object) -> Asked:
        """From reservation to the last token."""
        asked = self.reserve(prompt, **options)  # type: ignore[arg-type]
        self.join(asked)
        self.run()
        assert asked.drawn == asked.expected
        return asked


def test_a_received_prompt_is_cached() -> None:
    rig = Rig()
    first = rig.serve(range(19))
    assert first.reservation.held_tokens == 0
    again = rig.serve(range(19))
    assert again.reservation.held_tokens == 16, (
        "its last token is always computed, and its page crosses"
    )
    assert again.reservation.prompt_page_ids[:4] == first.reservation.prompt_page_ids[:4]
    assert rig.serve([*range(10), *range(50, 60)]).reservation.held_tokens == 8
    counts = [rig.count(name) for name in ("queried_tokens", "matched_tokens", "reused_tokens")]
    assert counts == [58, 24, 24]
    rig.check()


def test_generated_tokens_are_cached_with_their_prompt() -> None:
    """The last drawn token was never computed."""
    rig = Rig()
    first = rig.serve(range(6), max_tokens=11)
    assert rig.serve([*first.tokens, 7, 7]).reservation.held_tokens == 16
    rig.check()


def test_a_short_prompt_caches_its_output() -> None:
    rig = Rig()
    first = rig.serve([1, 2], max_tokens=8)
    assert rig.serve([*first.tokens, 7]).reservation.held_tokens == 8
    rig.check()


def test_output_of_recurrent_layers_is_not_cached() -> None:
    """A state rounds differently drawn and read, so what follows from it does."""
    rig = Rig(grid=8)
    first = rig.serve(range(18), max_tokens=12)
    assert rig.serve(range(18)).reservation.held_tokens == 16
    assert rig.serve([*first.tokens, 7]).reservation.held_tokens == 16
    rig.check()


def test_salts_and_requests_without_cache_are_separate() -> None:
    rig = Rig()
    rig.serve(range(9), salt="a")
    assert rig.serve(range(9), salt="b").reservation.held_tokens == 0
    assert rig.serve(range(9), caches=False).reservation.held_tokens == 0
    assert rig.serve(range(9), salt="a").reservation.held_tokens == 8
    rig.check()


def test_pages_received_without_draft_state_are_not_reused_with_a_draft() -> None:
    rig = Rig()
    for compatibility, with_draft in (("m+d", False), ("m", False), ("m+d", True), ("m+d", True)):
        asked = rig.reserve(range(9), compatibility=compatibility)
        assert asked.reservation.held_tokens == 0 or with_draft
        rig.join(asked, with_draft=with_draft)
        rig.run()
    assert asked.reservation.held_tokens == 8
    rig.check()


def test_a_prompt_that_was_never_received_leaves_nothing() -> None:
    rig = Rig()
    for lands in (False, True):
        asked = rig.reserve(range(9))
        if lands:
            rig.land(asked)  # and is never said to be whole
        rig.scheduler.release(asked.reservation.key)
    assert rig.reserve(range(9)).reservation.held_tokens == 0


def test_a_preempted_request_recomputes_only_evicted_pages() -> None:
    rig = Rig(num_pages=9)
    first, second = rig.reserve(range(5), max_tokens=14), rig.reserve(range(50, 55), max_tokens=14)
    rig.join(first)
    rig.join(second)
    rig.run()
    assert [event.num_preemptions for event in second.events if isinstance(event, Finished)] == [1]
    assert 0 < rig.num_read < 12, "it was set back with twelve tokens or more"
    assert (first.drawn, second.drawn) == (first.expected, second.expected)
    rig.check()


def test_cached_pages_are_evicted_before_any_preemption() -> None:
    rig = Rig(num_pages=12)
    rig.serve(range(20))
    held = rig.reserve(range(20), max_tokens=3)
    assert held.reservation.held_tokens == 16
    other = rig.reserve(range(50, 56), max_tokens=12)
    rig.join(other)
    rig.run()
    assert [event.num_preemptions for event in other.events if isinstance(event, Finished)] == [0]
    with pytest.raises(CapacityError):
        rig.reserve(range(100, 125), max_tokens=3)
    rig.join(held)
    rig.run()
    assert held.drawn == held.expected
    assert rig.scheduler.load().pages_free == 11
    rig.check()


def test_shared_pages_can_be_replaced_by_own_ones() -> None:
    """Its next source sends everything, and others go on reading."""
    rig = Rig()
    rig.serve(range(19))
    reader, asked = rig.reserve(range(19)), rig.reserve(range(19))
    asked.reservation = rig.scheduler.unshare(asked.reservation.key)
    assert asked.reservation.held_tokens == 0
    assert not set(asked.reservation.prompt_page_ids) & set(reader.reservation.prompt_page_ids)
    for each in (asked, reader):
        rig.join(each)
    rig.run()
    assert rig.count("reused_tokens") == 16
    rig.check()


def test_a_lost_stage_takes_everything_with_it() -> None:
    """Also what has landed and is said to be whole a moment later."""
    rig = Rig()
    rig.serve(range(20))
    asked = rig.reserve(range(20))
    rig.scheduler.on_pipeline_lost([], PeerLostError("stage 1 died"))
    rig.join(asked)
    assert rig.launch() is None
    rig.scheduler.release(asked.reservation.key)
    rig.check()
    assert rig.scheduler.pages.num_free == rig.scheduler.pages.num_total
    assert rig.reserve(range(20)).reservation.held_tokens == 0


def test_tree_entries_not_yet_moved_into_place_are_not_cached() -> None:
    """The stages move accepted entries into place with the next step, and the last one has none."""
    scheduler = DecodeScheduler(
        pages=PageAllocator(40),
        slots=SlotAllocator(0),
        clock=ManualClock(),
        cache_rule=ResumeRule(PAGE),
        limits=DecodeLimits(
            page_size=PAGE,
            grid=1,
            depth=1,
            max_running=4,
            max_context_tokens=64,
            num_draft_tokens=3,
        ),
    )
    events: list[DecodeEntryEvent] = []
    prompt = tuple(range(1, 8))
    key = scheduler.reserve(
        Request("r", prompt, 6, SamplingParams(temperature=0)),
        events.append,
        compatibility="m",
        blocks=block_names(prompt, PAGE, compatibility="m"),
    ).key
    scheduler.join(key, 100)
    entry = scheduler._entries[key]
    tree = TokenTree((100, 100), (-1, -1))
    for accepted in ((0,), (0, 2), (0, 1)):
        batch = scheduler.next_batch()
        assert batch is not None
        drawn = [SampledToken(100) for _ in accepted]
        scheduler.on_result(batch, StepResult(0, drawn, verified=[Verified(accepted, tree)]))
    assert any(isinstance(event, Finished) for event in events)
    assert entry.draft.accepted == AcceptedNodes(10, (0, 1)), "twelve are accepted"
    answer = (*prompt, *[100] * 6)
    assert scheduler.cache.find(block_names(answer, PAGE, compatibility="m"), 99).num_tokens == 8


class DecodeHistories(CacheMachine):
    """Random histories of a small pool: prompts over few tokens and those that go on from answers;
    they land, or are given up, or their rest is read; pages run out."""

    rig: Rig
    asked = Bundle("asked")

    @initialize(
        num_pages=st.integers(6, 24),
        window=st.sampled_from(("one", "two", "ahead")),
        grid=st.sampled_from((1, 1, 8)),
    )
    def begin(self, num_pages: int, window: str, grid: int) -> None:
        """Steps ahead: two in flight on one stage."""
        self.depth = 1 if window == "one" else 2
        self.rig = Rig(
            num_pages=num_pages,
            depth=2 if window == "two" else 1,
            grid=grid,
            local_rest_tokens=9,
            steps_ahead=window == "ahead",
        )

    @rule(
        target=asked,
        start=st.lists(st.sampled_from((0, 1)), min_size=0, max_size=4),
        tail=st.integers(1, 5),
        max_tokens=st.integers(1, 9),
        replayed=st.sampled_from((0, 0, 3)),
        caches=st.booleans(),
    )
    def reserve(
        self,
        start: list[int],
        tail: int,
        max_tokens: int,
        replayed: int,
        caches: bool,  # noqa: FBT001
    ) -> object:
        return self.try_reserve(
            [*itertools.chain(*([block] * PAGE for block in start)), *[2] * tail],
            max_tokens=max_tokens,
            replayed=min(replayed, max_tokens - 1),
            caches=caches,
        )

    @rule(
        target=asked,
        earlier=asked,
        cut=st.integers(1, 9),
        max_tokens=st.integers(1, 9),
        stops=st.frozensets(st.sampled_from((0, 1, 2)), max_size=1),
    )
    def go_on(
        self, earlier: Asked | None, cut: int, max_tokens: int, stops: frozenset[int]
    ) -> object:
        return (
            None
            if earlier is None
            else self.try_reserve(earlier.tokens[:-cut] or [1], max_tokens=max_tokens, stops=stops)
        )

    @rule(target=asked, earlier=asked, cut=st.integers(1, 9), max_tokens=st.integers(1, 9))
    def go_on_here(self, earlier: Asked | None, cut: int, max_tokens: int) -> object:
        prompt = [] if earlier is None else earlier.tokens[:-cut]
        if not prompt or len(prompt) + max_tokens > self.rig.scheduler.limits.max_context_tokens:
            return None
        try:
            return self.rig.read_rest(prompt, max_tokens=max_tokens)
        except CapacityError:
            return None

    def try_reserve(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        replayed: int = 0,
        caches: bool = True,
        stops: frozenset[int] = frozenset(),
    ) -> Asked | None:
        if len(prompt) + max_tokens > self.rig.scheduler.limits.max_context_tokens:
            return None
        try:
            return self.rig.reserve(
                prompt, max_tokens=max_tokens, replayed=replayed, caches=caches, stops=stops
            )
        except CapacityError:
            return None

    @rule(which=asked)
    def join(self, which: Asked | None) -> None:
        if which is not None and not which.has_joined:
            self.rig.join(which)

    @rule(which=asked)
    def unshare(self, which: Asked | None) -> None:
        if which is not None and not which.has_joined:
            try:
                which.reservation = self.rig.scheduler.unshare(which.reservation.key)
            except CapacityError:
                return

    @rule(which=consumes(asked))
    def release(self, which: Asked | None) -> None:
        if which is not None:
            which.has_joined = True  # nothing more may land
            self.rig.scheduler.release(which.reservation.key)

    @invariant()
    def draws_what_it_is_to_draw(self) -> None:
        for asked in self.rig.asked.values():
            assert asked.drawn == asked.expected[: len(asked.drawn)]
            assert len(asked.drawn) == len(asked.expected) or not asked.is_finished


TestDecodeHistories = DecodeHistories.TestCase
TestDecodeHistories.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
