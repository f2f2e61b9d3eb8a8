"""Batches of data ranks in one step (case ids: S3-1 to S3-7), and rows between the ranks that
divide a layer."""

import re
from collections.abc import Sequence

import pytest
import torch

from engine import loop as loop_module
from engine.contracts.model import StageOutput
from engine.core.batch import DataShare, ForwardBatch, ForwardMode, idle_batch
from engine.core.layer_range import Placement, TensorRank
from engine.core.request import Request, SamplingParams
from engine.core.rows import Row, build_batch, sampling_row
from engine.pipeline import records
from engine.pipeline.channel import PartPiece
from engine.pipeline.frame_parts import MAX_PART_BYTES
from engine.pipeline.ranks import StageRanks
from engine.pipeline.stage_executor import StageExecutor
from engine.pipeline.step_plan import RankBatches, plan_step, rows_per_rank
from engine.pipeline.tensor_channel import TensorChannel
from pool.stage.config import WorkerConfig
from pool.start import check_ranks
from runtime.errors import ConfigError, InternalError
from testing.inprocess_channel import InProcessChannel
from tests.engine.pipeline.test_ranks import together
from tests.support.models.tiny_models import QWEN3, tiny
from tests.support.pool.local_pool import local_pool

REQUEST = Request("r", (1, 2, 3), 5)


def batch(mode: ForwardMode, *lengths: int) -> ForwardBatch:
    """Build a batch with a row of each length; all but PREBUILT ones sample."""
    sampling = None if mode is ForwardMode.PREBUILT else sampling_row(REQUEST, ())
    return build_batch(
        mode,
        [Row(key, [7] * length, 0, [key + 1], 0, sampling) for key, length in enumerate(lengths)],
    )


def own(kind: str) -> ForwardBatch | None:
    return {
        "none": None,
        "decode": batch(ForwardMode.DECODE, 1, 1),
        "extend": batch(ForwardMode.PREFILL, 5, 2),
        "verify": batch(ForwardMode.VERIFY, 3, 4),
        "idle": idle_batch(),
        "prebuilt": batch(ForwardMode.PREBUILT, 0),
    }[kind]


def shown(step: RankBatches) -> list[str]:
    """Return each rank's mode, with a + if a PREBUILT one has an inner idle batch."""
    return [
        "-" if each is None else each.mode + "+" * (each.inner_idle is not None) for each in step
    ]


ALONE = {
    "none": "-",
    "decode": "decode",
    "extend": "prefill",
    "verify": "verify",
    "idle": "idle",
    "prebuilt": "prebuilt",
}
BESIDE_TOKENS = {**ALONE, "none": "idle", "prebuilt": "prebuilt+"}
SHARES = {
    "none": DataShare(0, 0),
    "decode": DataShare(2, 2),
    "extend": DataShare(7, 2),
    "verify": DataShare(7, 7),
    "idle": DataShare(0, 0),
    "prebuilt": DataShare(0, 0),
}


@pytest.mark.parametrize("kind", ALONE)
def test_s3_1_one_data_rank_runs_its_rows_and_counts_them(kind: str) -> None:
    given = own(kind)
    (found,) = plan_step([given])
    assert found is given, "never another, so never an idle one"
    assert shown((found,)) == [ALONE[kind]]
    assert found is None or found.shares == (SHARES[kind],)


@pytest.mark.parametrize("peer", ["none", "prebuilt", "idle"])
@pytest.mark.parametrize("kind", ALONE)
def test_s3_1_with_a_rank_without_tokens(kind: str, peer: str) -> None:
    has_tokens = SHARES[kind][0] > 0
    step = plan_step([own(kind), own(peer)])
    assert shown(step) == [ALONE[kind], (BESIDE_TOKENS if has_tokens else ALONE)[peer]]
    assert all(each.shares == (SHARES[kind], SHARES[peer]) for each in step if each is not None)


@pytest.mark.parametrize("peer", ["decode", "extend", "verify"])
@pytest.mark.parametrize("kind", ALONE)
def test_s3_1_with_a_rank_with_tokens(kind: str, peer: str) -> None:
    given = own(kind)
    step = plan_step([given, own(peer), None])
    assert shown(step) == [BESIDE_TOKENS[kind], ALONE[peer], "idle"]
    assert given is None or step[0] is given, "its own object, with the shares written into it"
    assert all(
        each is not None and each.shares == (SHARES[kind], SHARES[peer], DataShare(0, 0))
        for each in step
    )
    assert step[0] is not None
    assert step[0].inner_idle is None or step[0].inner_idle.shares == step[0].shares


@pytest.mark.parametrize(
    ("counts", "padded"), [([5, 7], [8, 8]), ([7, 4], [8, 4]), ([0, 5], [0, 8])], ids=str
)
def test_s3_2_rows_are_padded_to_a_multiple_of_attention_ranks_and_trimmed(
    counts: list[int], padded: list[int]
) -> None:
    assert [rows_per_rank(count, 4) * 4 for count in counts] == padded
    every = torch.arange(sum(counts) * 3, dtype=torch.float32).view(-1, 3)
    of_data_ranks = torch.split(every, counts)

    def step(ranks: StageRanks) -> tuple[bool, int]:
        noting = NotingParts(ranks)
        with ranks.step(1):
            gathered = ranks.gather_rows(of_data_ranks[ranks.own.data_rank], counts)
        return torch.equal(gathered, every), noting.num_bytes

    found = together(ranks_of(8, 2), [step] * 8)
    assert found == [(True, 7 * rows // 4 * 12) for rows in padded for _ in range(4)], (
        "its share to seven others"
    )


def prompts() -> list[Request]:
    return [
        Request(f"r{length}", tuple(range(3, 3 + length)), 6, SamplingParams(temperature=0.0))
        for length in (5, 7, 12)
    ]


@pytest.mark.parametrize(("tp", "dp"), [(4, 1), (4, 2)])
def test_s3_2_a_running_pool_pads_rows_that_data_ranks_gather(
    monkeypatch: pytest.MonkeyPatch, tp: int, dp: int
) -> None:
    """All ranks of one data rank have all rows after attention: nothing is gathered there, and
    nothing padded."""
    steps, gathered = list[RankBatches](), list[tuple[int, ...]]()
    gather_rows = StageRanks.gather_rows

    def noting(self: StageRanks, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        gathered.append(tuple(counts))
        return gather_rows(self, rows, counts)

    def planned(own: Sequence[ForwardBatch | None]) -> RankBatches:
        steps.append(plan_step(own))
        return steps[-1]

    with local_pool(tiny(QWEN3)) as pool:
        expected = [answer.tokens for answer in pool.generate(prompts())]
    monkeypatch.setattr(StageRanks, "gather_rows", noting)
    monkeypatch.setattr(loop_module, "plan_step", planned)
    with local_pool(tiny(QWEN3), tp=tp, dp=dp) as pool:
        assert [answer.tokens for answer in pool.generate(prompts())] == expected
    batches = [
        (place, batch) for step in steps for place, batch in enumerate(step) if batch is not None
    ]
    assert batches
    assert all(
        len(batch.shares) == dp and batch.shares[place].tokens == batch.num_tokens
        for place, batch in batches
    )
    odd = [counts for counts in gathered if any(count % (tp // dp) for count in counts)]
    assert bool(odd) == bool(gathered) == (dp > 1)


class NotingParts:
    """Counts the bytes that a rank sends, to each of the others."""

    max_bytes = MAX_PART_BYTES

    def __init__(self, ranks: StageRanks) -> None:
        assert ranks._parts is not None
        self.num_bytes = 0
        self._parts = ranks._parts
        ranks._parts = self

    def begin(self, sequence: int) -> None:
        self._parts.begin(sequence)

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        self.num_bytes += len(piece.data) * len(ranks)
        self._parts.send(ranks, piece, timeout_s=timeout_s)

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        return self._parts.receive(rank, into, timeout_s=timeout_s)

    def abandon(self) -> None:
        self._parts.abandon()


def test_s3_3_one_data_rank_without_a_batch_runs_nothing() -> None:
    assert plan_step([None]) == (None,)


def test_s3_4_ranks_run_idle_only_if_another_has_tokens() -> None:
    assert shown(plan_step([own("decode"), None])) == ["decode", "idle"]
    assert plan_step([None, None]) == (None, None)
    assert shown(plan_step([None, own("prebuilt")])) == ["-", "prebuilt"], "no rank has a forward"


class NotingModel:
    """Notes the batches whose forward it is given."""

    def __init__(self) -> None:
        self.seen: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch, *given: object) -> StageOutput:
        self.seen.append(batch)
        return StageOutput()


def test_s3_5_a_prebuilt_batch_takes_part_in_each_busy_step_once() -> None:
    model = NotingModel()
    executor = StageExecutor(model=model, attention=object(), recurrent=object())  # type: ignore[arg-type]
    prebuilt = own("prebuilt")
    step = plan_step([prebuilt, own("decode")])
    assert step[0] is not None
    executor.run(step[0])
    assert [(each.mode, each.num_tokens, each.shares) for each in model.seen] == [
        (ForwardMode.IDLE, 0, (DataShare(0, 0), DataShare(2, 2)))
    ]
    assert executor.num_forwards == {"graph": 0, "eager": 0, "halves": 0, "idle": 1}
    for quiet in (plan_step([prebuilt, None]), plan_step([prebuilt])):
        assert quiet[0] is not None
        executor.run(quiet[0])
    assert len(model.seen) == 1, "what an earlier step needed is not run again"


def test_s3_5_the_inner_idle_batch_is_known_on_every_stage() -> None:
    step = plan_step([own("prebuilt"), own("extend")])
    assert step[0] is not None
    arrived = records.unpack_batch(records.pack_input(3, step[0])).batch
    assert arrived.inner_idle is not None
    assert arrived.inner_idle.shares == step[0].shares == (DataShare(0, 0), DataShare(7, 2))


def test_s3_6_rows_of_a_step_that_was_not_planned_are_refused() -> None:
    ranks = ranks_of(4, 2)[0]
    with ranks.step(1):
        for counts in ([], [2], [3, 1]):
            with pytest.raises(
                InternalError,
                match=re.escape(f"2 rows of data rank 0 of 2, in a step planned for {counts}"),
            ):
                ranks.gather_rows(torch.zeros(2, 3), counts)


def test_the_shares_name_the_adapters_of_every_rank() -> None:
    """By runs of tokens: of a prompt's tokens, only the last one of a row needs logits."""
    adapted = batch(ForwardMode.PREFILL, 5, 2, 3)
    adapted.adapters = ("a", "", "b")
    step = plan_step([batch(ForwardMode.DECODE, 1, 1), adapted])
    runs = ((("a", 5), ("", 2), ("b", 3)), (("a", 1), ("", 1), ("b", 1)))
    expected = (DataShare(2, 2), DataShare(10, 3, *runs))
    assert all(each is not None and each.shares == expected for each in step)
    (alone,) = plan_step([adapted])
    assert alone is not None
    assert alone.shares == (DataShare(10, 3),), "a rank alone has them in its rows"


def test_s3_6_changing_a_batch_drops_the_shares() -> None:
    step = plan_step([batch(ForwardMode.DECODE, 1, 1), None])
    assert step[0] is not None
    assert step[0].filter([0]).shares == ()


def test_s3_7_graphs_are_refused_if_ranks_share_a_stage() -> None:
    """So no rank replays a graph while another runs kernel by kernel, and there is nothing to vote
    on."""
    config = WorkerConfig.model_validate(
        {"model": ".", "world_size": 2, "tp": 2, "dp_attention": 2, "device": "cuda"}
    )
    with pytest.raises(ConfigError, match="--tp 2 is for device cpu"):
        check_ranks(config)


def ranks_of(size: int, data_size: int) -> list[StageRanks]:
    """Build the ranks of a pool of one stage."""
    channels = [TensorChannel(frames, max_bytes=1 << 26) for frames in InProcessChannel.pool(size)]
    found = [StageRanks(TensorRank(rank, size, data_size)) for rank in range(size)]
    for ranks, channel in zip(found, channels, strict=True):
        ranks.use(channel)
    return found


@pytest.mark.parametrize("counts", [[5, 0], [3, 4], [1, 8]], ids=str)
def test_rows_go_to_all_ranks_and_come_back(counts: list[int]) -> None:
    every = torch.arange(sum(counts) * 2, dtype=torch.bfloat16).view(-1, 2)
    of_data_ranks = torch.split(every, counts)

    def step(ranks: StageRanks) -> object:
        mine = of_data_ranks[ranks.own.data_rank]
        with ranks.step(1):
            if len(mine):  # only these have attention to divide
                assert ranks.attention.gather(torch.full((1,), float(ranks.own.rank))).tolist() == [
                    2 * ranks.own.data_rank,
                    2 * ranks.own.data_rank + 1,
                ]
            gathered = ranks.gather_rows(mine, counts)
            columns = (gathered + ranks.own.rank)[:, :1].repeat(1, 1 + ranks.own.rank)
            collected = ranks.collect(columns, counts, [1, 2, 3, 4])
            own_part = ranks.own_rows(gathered, counts)
            return (
                torch.equal(gathered, every),
                torch.equal(own_part, mine),
                None
                if collected is None
                else torch.equal(
                    collected,
                    torch.cat(
                        [(mine + rank)[:, :1].repeat(1, 1 + rank) for rank in range(4)], dim=1
                    ),
                ),
            )

    draws = [True, None, True, None]
    assert together(ranks_of(4, 2), [step] * 4) == [(True, True, each) for each in draws]


def test_a_process_knows_its_data_rank() -> None:
    places = [Placement.of(rank, 8, 4, 2) for rank in range(8)]
    assert [place.tensor.data_rank for place in places] == [0, 0, 1, 1] * 2
    assert [place.tensor.attention for place in places[:4]] == [
        TensorRank(0, 2),
        TensorRank(1, 2),
    ] * 2
    assert [rank for rank, place in enumerate(places) if place.samples] == [4, 6]
    with pytest.raises(
        ConfigError, match=r"4 ranks \(--tp\) do not form 3 equal groups \(--dp-attention\)"
    ):
        Placement.of(0, 4, 4, 3)
