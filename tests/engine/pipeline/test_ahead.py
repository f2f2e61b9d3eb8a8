"""A stage whose next step is prepared during a computation: the order of events, the plan's mark
(S1), failures."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from decode.worker import DecodeRole
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.request import SampledToken, SamplingParams
from engine.core.rows import NOT_SAMPLED, Row, build_batch
from engine.pipeline.ahead import AheadStage, put_sampled, sampled_tokens
from engine.pipeline.results import StepFailed, StepResult, StepResults
from engine.pipeline.stages import SingleStage
from engine.sampling.guided import GuidedSampler
from pool.role import PoolRole
from pool.stage.config import WorkerConfig
from pool.start import check_overlap
from prefill.worker import PrefillRole
from runtime.errors import ConfigError, PeerLostError
from tests.engine.speculative.test_plan_sites import executor
from tests.engine.test_loop import ScriptedScheduler
from tests.support.pool.local_pool import running

SAMPLED = SamplingRow(SamplingParams(temperature=0), position=1)
WAIT_S = 30.0


def step(*rows: tuple[int, int], samples: bool = True) -> ForwardBatch:
    """Build a batch of (key, token) rows."""
    return build_batch(
        ForwardMode.DECODE,
        [Row(key, [token], 5, [1 + key], 0, SAMPLED if samples else None) for key, token in rows],
    )


def ids(batch: ForwardBatch) -> list[int]:
    assert batch.token_ids is not None
    return batch.token_ids.tolist()


@dataclass
class Script:
    """A stage that samples 100 and on, one token per sampling row, and records its batches.
    `before`: actions in the steps of these numbers."""

    depth: int = 1
    runs_apart: bool = False
    before: dict[int, Callable[[], None]] = field(default_factory=dict)
    seen: list[list[int]] = field(default_factory=list)
    result: StepResult | None = None

    def launch(self, launched: tuple[ForwardBatch | None, ...]) -> None:
        (batch,) = launched
        assert batch is not None
        number = len(self.seen)
        self.seen.append(ids(batch))
        self.result = StepResult(
            number,
            [
                SampledToken(100 * (number + 1) + row)
                for row, sampling in enumerate(batch.sampling)
                if sampling is not None
            ],
        )
        try:
            self.before.get(number, lambda: None)()
        except StepFailed as error:
            self.result = StepResult(number, [], error)

    def collect(self, timeout_s: float) -> StepResults | None:
        return (self.result,)

    def wake(self) -> None:
        pass


@dataclass
class Planner:
    """In an executor's place: notes which batches were planned."""

    planned: list[ForwardBatch] = field(default_factory=list)
    on_plan: Callable[[], None] = lambda: None

    def plan_ahead(self, batch: ForwardBatch) -> None:
        self.planned.append(batch)
        self.on_plan()


@pytest.fixture
def stages() -> Iterator[list[AheadStage]]:
    made: list[AheadStage] = []
    yield made
    for stage in made:
        stage.close()


def ahead(stages: list[AheadStage], script: Script, planner: object = None) -> AheadStage:
    stages.append(AheadStage(script, planner or Planner()))  # type: ignore[arg-type]
    return stages[-1]


def result(stage: AheadStage) -> StepResult:
    results = stage.collect(WAIT_S)
    assert results is not None
    assert results[0] is not None
    return results[0]


def test_the_next_step_is_planned_before_the_one_that_computes_ends(
    stages: list[AheadStage],
) -> None:
    """The first forward ends only once the second step was planned."""
    planned, events = threading.Event(), list[str]()

    def plan() -> None:
        events.append("planned")
        if len(planner.planned) == 2:
            planned.set()

    def forward() -> None:
        assert planned.wait(WAIT_S), "the next step was not prepared meanwhile"
        events.append("ended")

    planner = Planner(on_plan=plan)
    stage = ahead(stages, Script(before={0: forward}), planner)
    stage.launch((step((1, 7)),))
    stage.launch((step((1, NOT_SAMPLED)),))
    assert [token.token_id for token in result(stage).tokens] == [100]
    assert [token.token_id for token in result(stage).tokens] == [200]
    assert events == ["planned", "planned", "ended"]


def test_the_loop_prepares_a_step_while_one_computes(stages: list[AheadStage]) -> None:
    scheduler, planner = ScriptedScheduler(work=3), Planner()
    second = threading.Event()
    planner.on_plan = lambda: second.set() if len(planner.planned) == 2 else None
    in_time: list[bool] = []
    stage = ahead(stages, Script(before={0: lambda: in_time.append(second.wait(WAIT_S))}), planner)
    with running(stage, scheduler):
        assert scheduler.idle.wait(WAIT_S)
    assert in_time == [True]
    assert scheduler.log == ["result 1 ok", "result 2 ok", "result 3 ok"]


def test_rows_get_the_token_sampled_for_their_request(stages: list[AheadStage]) -> None:
    script = Script()
    stage = ahead(stages, script)
    for batch in (
        step((1, 7), (2, 8), (3, 9)),
        step((3, NOT_SAMPLED), (5, 6), (1, NOT_SAMPLED)),
        step((1, NOT_SAMPLED)),
    ):
        stage.launch((batch,))
    for _ in range(3):
        result(stage)
    assert script.seen == [[7, 8, 9], [102, 6, 100], [202]]


def test_a_row_without_sampling_gives_no_token() -> None:
    batch = step((1, 7), (2, 8))
    batch.sampling = (None, SAMPLED)
    assert sampled_tokens(batch, StepResult(0, [SampledToken(42)])) == {2: 42}
    follows = step((1, 9), (2, NOT_SAMPLED))
    put_sampled(follows, {2: 42})
    assert ids(follows) == [9, 42]


def test_a_failed_step_leaves_its_followers_a_token_of_the_vocabulary(
    stages: list[AheadStage],
) -> None:
    """Their requests have failed with it; those that joined must not."""

    def fail() -> None:
        raise StepFailed("no")

    script = Script(before={0: fail})
    stage = ahead(stages, script)
    stage.launch((step((1, 7)),))
    stage.launch((step((1, NOT_SAMPLED), (2, 8)),))
    assert isinstance(result(stage).error, StepFailed)
    assert result(stage).error is None
    assert script.seen[1] == [0, 8]


def test_a_broken_stage_breaks_the_pipeline(stages: list[AheadStage]) -> None:
    def break_down() -> None:
        raise PeerLostError("gone")

    stage = ahead(stages, Script(before={0: break_down}))
    stage.launch((step((1, 7)),))
    with pytest.raises(PeerLostError, match="gone"):
        stage.collect(WAIT_S)


def test_a_wait_ends_early_if_woken_and_in_time_otherwise(
    stages: list[AheadStage],
) -> None:
    stage = ahead(stages, Script())
    assert stage.collect(0.001) is None
    stage.wake()
    assert stage.collect(WAIT_S) is None


def test_a_thread_that_is_closed_ends(stages: list[AheadStage]) -> None:
    stage = ahead(stages, Script())
    stage.close()
    assert not stage._thread.is_alive()


# The plan that was made ahead.


def test_s1_2_a_plan_made_ahead_is_marked_and_the_one_that_runs() -> None:
    """The tokens that come later change nothing of it."""
    stage, attention, model = executor()
    batch = step((0, NOT_SAMPLED), (1, 3), samples=False)
    stage.plan_ahead(batch)
    assert batch.forward_metadata_planner is attention
    plan = batch.forward_metadata_plan
    put_sampled(batch, {0: 9})
    assert ids(batch) == [9, 3]
    stage.run(batch)
    assert (attention.num_plans, stage.num_plans) == (1, 1)
    assert model.plans == [plan]


class Attending:
    """A model of one layer whose forward runs attention on the batch's plan."""

    layer_range = None

    def forward(
        self, batch: ForwardBatch, hidden: object, context: SimpleNamespace, *others: object
    ) -> None:
        x = torch.ones(batch.num_tokens, 1, 8)
        context.attention.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)


@pytest.mark.parametrize("change", ["other rows'", "another backend's"])
def test_s1_7_a_plan_made_ahead_for_another_batch_is_refused(
    change: str, stages: list[AheadStage]
) -> None:
    """As everywhere: it is not made again in silence, and the step fails with the reason."""
    (runs, _, _), (other, _, _) = executor(), executor()
    runs.model = Attending()  # type: ignore[assignment]
    single = SingleStage(runs, GuidedSampler(None))

    def plan_ahead(batch: ForwardBatch) -> None:
        if change == "another backend's":
            other.plan_ahead(batch)
        else:
            wider = step((0, 3), (1, 4))
            runs.plan_ahead(wider)
            batch.plan_mark = wider.plan_mark

    stage = AheadStage(single, SimpleNamespace(plan_ahead=plan_ahead))  # type: ignore[arg-type]
    stages.append(stage)
    stage.launch((step((0, 3), samples=False),))
    error = result(stage).error
    assert isinstance(error, StepFailed)
    assert "planned" in str(error)


def test_a_batch_that_cannot_be_planned_fails_and_the_next_one_runs(
    stages: list[AheadStage],
) -> None:
    runs, _, _ = executor()
    stage = AheadStage(SingleStage(runs, GuidedSampler(None)), runs)
    stages.append(stage)
    wrong = step((0, 3), samples=False)
    wrong.page_tables = torch.full_like(wrong.page_tables, 99)
    stage.launch((wrong,))
    stage.launch((step((0, 3), samples=False),))
    assert "99" in str(result(stage).error)
    assert result(stage).error is None


def test_a_device_plans_after_the_running_batch() -> None:
    """Its plan is in buffers that the running batch reads."""
    stage, attention, _ = executor()
    stage._device = torch.device("cuda")
    stage.plan_ahead(step((0, 3)))
    assert attention.num_plans == 0


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        (PrefillRole(), {}),
        (DecodeRole(), {"world_size": 2}),
        (DecodeRole(), {"world_size": 2, "tp": 2}),
        (DecodeRole(), {"draft": "."}),
    ],
    ids=["prefill", "stages", "ranks", "draft"],
)
def test_pools_that_prepare_no_step_ahead_refuse_the_flag(
    role: PoolRole, settings: dict[str, object]
) -> None:
    with pytest.raises(
        ConfigError, match="a decode pool of one process, without a draft"
    ) as refused:
        check_overlap(
            WorkerConfig.model_validate({"model": ".", "overlap_steps": True, **settings}), role
        )
    assert refused.value.field == "overlap_steps"
    check_overlap(WorkerConfig.model_validate({"model": ".", "overlap_steps": True}), DecodeRole())
