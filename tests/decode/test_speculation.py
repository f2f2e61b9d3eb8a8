"""Speculation never changes the output: tokens and the bits of their logprobs, on every shape of
pool and draft."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from decode.entry import DecodeEntryEvent
from decode.speculation import VerifiedStep
from engine.core.request import Request, SamplingParams
from models.loader import ModelDescription
from tests.support.drafts.drafters import CHAINS, TREES, OracleDrafter, Shape, always
from tests.support.models.tiny_models import HYBRID, KIMI_LINEAR, LLAMA, tiny
from tests.support.pool.local_pool import Answer, LocalPool, Speculation, call, local_pool

SHAPES = {**CHAINS, **TREES}
TREE = TREES["tree 4x4/15"]
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=2, frequency_penalty=0.4),
    SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.5),
    SamplingParams(temperature=1.1, min_p=0.02, seed=2**63 + 5, logit_bias=((7, 3.0), (9, -100.0))),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def requests(max_tokens: int = 24) -> list[Request]:
    """Return five requests near page and chunk borders; one stops at a token, but not before the
    sixth."""
    rng = random.Random(0)
    lengths = (1, 15, 40, 64, 130)
    stops = frozenset(range(0, 256, 23))
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(3, 256) for _ in range(length)),
            max_tokens,
            params,
            num_top_logprobs=2,
            min_tokens=6 * (i == 1),
            stop_token_ids=stops if i == 1 else frozenset(),
        )
        for i, (length, params) in enumerate(zip(lengths, SAMPLING, strict=True))
    ]


def shown(answers: Sequence[Answer]) -> list[object]:
    assert all(answer.finished is not None and answer.failed is None for answer in answers)
    return [
        (list(answer.tokens), answer.finished.reason, answer.finished.stop_token_id)
        for answer in answers
        if answer.finished is not None
    ]


FAMILIES = ["hybrid-float32", "hybrid-bfloat16", "llama-float32"]


def grid(targets: Sequence[str], sizes: Sequence[int]) -> list[ParameterSet]:
    """Return every target with every shape in one of the sizes, so that any two of the three occur
    together; the others are marked long."""
    return [
        pytest.param(
            target,
            shape,
            size,
            id=f"{target}-{shape}-{size}",
            marks=() if size == sizes[(i + j) % len(sizes)] else pytest.mark.long,
        )
        for i, target in enumerate(targets)
        for j, shape in enumerate(SHAPES)
        for size in sizes
    ]


@pytest.fixture(
    scope="module", params=[*FAMILIES, pytest.param("kimi-bfloat16", marks=pytest.mark.long)]
)
def description(request: pytest.FixtureRequest) -> ModelDescription:
    family, dtype = request.param.split("-")
    return tiny({"hybrid": HYBRID, "llama": LLAMA, "kimi": KIMI_LINEAR}[family], dtype)


@pytest.fixture(scope="module")
def reference(description: ModelDescription) -> list[Answer]:
    """Run every request alone, without speculation, in one process."""
    torch.set_num_threads(1)
    with local_pool(description, chunk_tokens=512) as pool:
        return [pool.generate([request])[0] for request in requests()]


@pytest.fixture(scope="module")
def truth(reference: list[Answer]) -> dict[int, list[int]]:
    """Map the key that a fresh pool gives a request to its tokens and some that never follow."""
    return {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens), 11, 12, 13]
        for key, (request, answer) in enumerate(zip(requests(), reference, strict=True), start=1)
    }


def speculating(drafter: OracleDrafter) -> Speculation:
    return Speculation(always(drafter), drafter.shape.nodes)


def assert_nothing_leaked(pool: LocalPool) -> None:
    scheduler = pool.scheduler
    for allocator in (scheduler.pages, scheduler.slots, scheduler.scratch):
        assert allocator.num_free == allocator.num_total
    scheduler.on_idle()


@pytest.mark.parametrize(
    ("description", "shape", "size"), grid(FAMILIES, [1, 2, 3]), indirect=["description"]
)
def test_a_draft_that_is_always_right(
    description: ModelDescription,
    reference: list[Answer],
    truth: dict[int, list[int]],
    shape: str,
    size: int,
) -> None:
    drafter = OracleDrafter(SHAPES[shape], truth)
    with local_pool(description, size, speculation=speculating(drafter)) as pool:
        assert shown(pool.generate(requests())) == shown(reference)
        assert_nothing_leaked(pool)
    if drafter.shape.width == 1:  # the last step of a request may be cut short, nothing else
        num_generated, depth = (
            sum(len(answer.tokens) - 1 for answer in reference),
            drafter.shape.depth,
        )
        assert (
            sum(drafter.accepted) >= num_generated * depth // (depth + 1) - len(reference) * depth
        )


@pytest.mark.parametrize(
    ("description", "shape", "size"), grid(FAMILIES, [1, 3]), indirect=["description"]
)
def test_a_draft_that_is_sometimes_right(
    description: ModelDescription,
    reference: list[Answer],
    truth: dict[int, list[int]],
    shape: str,
    size: int,
) -> None:
    drafter = OracleDrafter(SHAPES[shape], truth, error_rate=0.3)
    with local_pool(description, size, speculation=speculating(drafter)) as pool:
        assert shown(pool.generate(requests())) == shown(reference)
    assert sum(drafter.accepted) > 0


@pytest.mark.parametrize("shape", [SHAPES["chain 3"], TREE], ids=["chain", "tree"])
def test_a_random_draft(
    description: ModelDescription, reference: list[Answer], shape: Shape
) -> None:
    with local_pool(description, 2, speculation=speculating(OracleDrafter(shape))) as pool:
        assert shown(pool.generate(requests())) == shown(reference)


@pytest.mark.parametrize("shape", [SHAPES["chain 5"], TREE], ids=["chain", "tree"])
def test_alone(
    description: ModelDescription,
    reference: list[Answer],
    truth: dict[int, list[int]],
    shape: Shape,
) -> None:
    for key, (request, answer) in enumerate(zip(requests(), reference, strict=True), start=1):
        drafter = OracleDrafter(shape, {1: truth[key]}, error_rate=0.2)
        with local_pool(description, speculation=speculating(drafter)) as pool:
            assert shown(pool.generate([request])) == shown([answer])


@pytest.mark.parametrize(
    ("shape", "size", "max_running"), [(SHAPES["chain 3"], 2, 2), (TREE, 1, 1), (TREE, 3, 3)]
)
def test_more_requests_are_held_than_trees_are_kept(
    description: ModelDescription,
    reference: list[Answer],
    truth: dict[int, list[int]],
    shape: Shape,
    size: int,
    max_running: int,
) -> None:
    """Recurrent states of nodes are kept for `max_running` requests; the others take plain steps
    until one leaves."""
    drafter = OracleDrafter(shape, truth, error_rate=0.2)
    with local_pool(
        description,
        size,
        max_running=max_running,
        max_held=5,
        speculation=replace(speculating(drafter), poisons_leftovers=True),
    ) as pool:
        steps: list[VerifiedStep] = []
        pool.scheduler.on_verified = lambda step, num_running: steps.append(step)
        assert shown(pool.generate(requests())) == shown(reference)
        assert_nothing_leaked(pool)
        num_records = pool.scheduler.scratch.num_total
        assert num_records == (max_running if pool.scheduler.slots.num_total else 0)
    assert sum(drafter.accepted) > 0
    assert any(step.num_declined for step in steps) == bool(num_records)


@pytest.mark.parametrize(
    ("shape", "size", "max_running"),
    [(SHAPES["chain 3"], 2, 8), (TREE, 1, 8), (TREE, 2, 2)],
    ids=["chain", "tree", "few trees"],
)
def test_preempted_and_replayed(
    description: ModelDescription, shape: Shape, size: int, max_running: int
) -> None:
    # Admission alone needs all 23 pages, the longer outputs need 33.
    wanted = requests(max_tokens=48)
    with local_pool(description) as pool:
        plain = pool.generate(wanted)
    truth = {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens)]
        for key, (request, answer) in enumerate(zip(wanted, plain, strict=True), start=1)
    }
    drafter = OracleDrafter(shape, truth, error_rate=0.3 if max_running == 8 else 0.9)
    with local_pool(
        description,
        size,
        num_pages=24,
        max_running=max_running,
        max_held=8,
        speculation=speculating(drafter),
    ) as pool:
        answers = pool.generate(wanted)
        assert_nothing_leaked(pool)
    assert shown(answers) == shown(plain)
    assert (
        sum(answer.finished.num_preemptions for answer in answers if answer.finished is not None)
        > 0
    )


def test_a_hundred_requests_of_which_a_fifth_is_cancelled_leave_nothing() -> None:
    """Pages of the draft are those of the target: one lease holds both. Half of them have trees at
    a time."""
    description, rng, num_cancelled = tiny(HYBRID), random.Random(3), 0
    wanted = [
        Request(
            f"r{i}",
            tuple(rng.randrange(3, 256) for _ in range(rng.randrange(1, 40))),
            8,
            SamplingParams(temperature=1.0, seed=i),
        )
        for i in range(6)
    ]
    drafter = OracleDrafter(SHAPES["tree 4x4/15"])
    with local_pool(
        description, 2, num_pages=40, max_running=3, max_held=8, speculation=speculating(drafter)
    ) as pool:
        expected = [shown([answer]) for answer in pool.generate(wanted)]
        for wave in range(17):
            answers = [
                Canceller(pool, after=rng.randrange(8) if rng.random() < 0.2 else None)
                for _ in wanted
            ]
            call(pool.loop, partial(start_all, answers, wanted))
            for answer, plain in zip(answers, expected, strict=True):
                assert answer.over.wait(60), f"wave {wave}"
                assert answer.cancelled or shown([answer.answer]) == plain
            num_cancelled += sum(answer.cancelled for answer in answers)
        deadline = time.monotonic() + 60
        while pool.scheduler.load().running_requests and time.monotonic() < deadline:
            time.sleep(0.01)  # what was released in flight ends with its step
        assert_nothing_leaked(pool)
    assert 10 < num_cancelled < 30


def start_all(clients: "list[Canceller]", wanted: list[Request]) -> None:
    for client, request in zip(clients, wanted, strict=True):
        client.start(request)


class Canceller:
    """A client that cancels `after` this many tokens, if any."""

    def __init__(self, pool: LocalPool, *, after: int | None) -> None:
        self.answer, self.over, self.cancelled = Answer(), threading.Event(), False
        self._pool, self._after, self._key = pool, after, 0

    def start(self, request: Request) -> None:
        self._key = self._pool.scheduler.submit_local(request, self._emit)

    def _emit(self, event: DecodeEntryEvent) -> None:
        self.answer.emit(event)
        if self._after is not None and len(self.answer.tokens) > self._after and not self.cancelled:
            self.cancelled = True
            self._pool.loop.post(self._release)
        elif self.answer.done.is_set():
            self.over.set()

    def _release(self) -> None:
        self._pool.scheduler.release(self._key)
        self.over.set()


def test_a_request_may_decline(
    description: ModelDescription, reference: list[Answer], truth: dict[int, list[int]]
) -> None:
    drafter = OracleDrafter(SHAPES["chain 3"], truth)
    wanted = [
        replace(request, speculates=index % 2 == 0) for index, request in enumerate(requests())
    ]
    with local_pool(description, speculation=speculating(drafter)) as pool:
        steps: list[VerifiedStep] = []
        pool.scheduler.on_verified = lambda step, num_running: steps.append(step)
        assert shown(pool.generate(wanted)) == shown(reference)
    assert all(step.num_drafted <= 3 * 3 for step in steps), "two of five declined"
    assert all(len(step.accepted) <= 3 for step in steps)
    assert any(step.num_declined for step in steps)
    assert sum(step.num_tokens for step in steps) >= sum(
        len(answer.tokens) - 1 for answer in reference
    )
    assert sum(sum(step.accepted) for step in steps) == sum(drafter.accepted)


def test_no_drafter_is_plain_decoding(
    description: ModelDescription, reference: list[Answer]
) -> None:
    drafter = OracleDrafter(Shape(1, 0, 0))
    with local_pool(description, speculation=Speculation(always(drafter), 3)) as pool:
        assert shown(pool.generate(requests())) == shown(reference)
