"""Layer ranges of pipeline stages, and what each rank of a stage has of a layer. Layer ids are
global everywhere; only pools subtract `start`, inside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from runtime.errors import ConfigError


@dataclass(frozen=True, order=True)
class LayerRange:
    """Half-open interval of global layer ids."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"layer range needs 0 <= start <= end, got {self.start}-{self.end}")

    def __contains__(self, layer_id: int) -> bool:
        return self.start <= layer_id < self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    def intersect(self, other: "LayerRange") -> "LayerRange":
        """The layers both own; empty (start == end) if none."""
        start = max(self.start, other.start)
        return LayerRange(start, max(start, min(self.end, other.end)))


EIGHTHS, EIGHTHS_GRID = (
    8,
    16,
)  # segments of every sum (`engine.kernels.host`), and terms of which they are equal


def eighth(num_terms: int) -> int:
    """Return how many terms each segment of a sum has. Pairs stay together; the last ones have what
    is left."""
    return -(-num_terms // EIGHTHS_GRID) * (EIGHTHS_GRID // EIGHTHS)


@dataclass(frozen=True)
class Part:
    """Half-open interval `start` to `stop` of `total` things of a kind: heads, columns, tokens of
    the vocabulary."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return len(self) == self.total

    def times(self, count: int) -> "Part":
        """The same of things of which each of these has `count`."""
        return Part(self.start * count, self.stop * count, self.total * count)

    @classmethod
    def whole(cls, total: int) -> "Part":
        return cls(0, total, total)


@dataclass(frozen=True)
class TensorRank:
    """Which of the ranks that share a stage. The ranks have the same layers, and a part of each
    layer.

    With several data ranks (`data_size`) neighbours are grouped into these: each has requests of
    its own, whose attention and cache only its `attention` ranks divide.
    """

    rank: int = 0
    size: int = 1
    data_size: int = 1

    @property
    def attention(self) -> "TensorRank":
        """Which of the ranks that share the requests of its data rank."""
        each = self.size // self.data_size
        return TensorRank(self.rank % each, each)

    @property
    def data_rank(self) -> int:
        return self.rank // (self.size // self.data_size)

    def part(self, total: int, what: str) -> Part:
        """Return this rank's of `total` things that the ranks have equal parts of. `what` names
        them for people, with the config's field. Raises ConfigError when the ranks do not divide
        them."""
        if total % self.size:
            raise ConfigError(f"--tp {self.size} does not divide the {total} {what}", field="tp")
        each = total // self.size
        return Part(self.rank * each, (self.rank + 1) * each, total)

    def share(self, total: int, what: str) -> Part:
        """Return this rank's of `total` things that the ranks need no equal parts of: the first
        ones have one more. Raises ConfigError when there are fewer things than ranks."""
        if total < self.size:
            raise ConfigError(
                f"--tp {self.size} leaves a rank without any of the {total} {what}", field="tp"
            )
        each, more = divmod(total, self.size)
        start = self.rank * each + min(self.rank, more)
        return Part(start, start + each + (self.rank < more), total)

    def shares(self, total: int, what: str) -> tuple[Part, ...]:
        """Return the `share` of every rank."""
        return tuple(replace(self, rank=rank).share(total, what) for rank in range(self.size))

    def terms(self, total: int, what: str) -> Part:
        """Return this rank's of the terms of sums over the ranks: whole eighths of a sum, of which
        the last rank's may be shorter. Raises ConfigError when a rank would have none."""
        if self.size == 1 or not total:
            return Part.whole(total)
        if EIGHTHS % self.size:
            raise ConfigError(
                f"--tp {self.size}: sums over {total} {what} have eighths, which 2, 4 or 8 ranks share",
                field="tp",
            )
        each = eighth(total) * (EIGHTHS // self.size)
        if each * (self.size - 1) >= total:
            raise ConfigError(
                f"--tp {self.size} leaves a rank without any of the {total} {what}", field="tp"
            )
        return Part(self.rank * each, min((self.rank + 1) * each, total), total)

    def heads(self, count: int, width: int, what: str) -> Part:
        """Return this rank's of `count` heads, whose `width` values each are terms of sums over the
        ranks. Raises ConfigError when the ranks do not divide them, or an eighth of a sum would
        begin within a head."""
        heads = self.part(count, what)
        if self.terms(count * width, f"values of the {what}") != heads.times(width):
            raise ConfigError(
                f"--tp {self.size}: sums over {count * width} values of the {what} have no equal eighths "
                f"for the ranks, as multiples of {EIGHTHS_GRID} have",
                field="tp",
            )
        return heads

    def shared_part(self, total: int, what: str) -> Part:
        """Likewise; where there are fewer things than ranks, neighbours have the same one."""
        if total >= self.size or not total or self.size % total:
            return self.part(total, what)
        own = self.rank * total // self.size
        return Part(own, own + 1, total)


ONLY_RANK = TensorRank()  # of a stage that is one process


@dataclass(frozen=True)
class Placement:
    """A process's place in its pool: which stage, and which rank of it. Processes are numbered
    stage by stage."""

    pipeline_rank: int = 0
    pipeline_size: int = 1
    tensor: TensorRank = ONLY_RANK

    @classmethod
    def of(cls, rank: int, world_size: int, tensor_size: int, data_size: int = 1) -> "Placement":
        """Of process `rank` of `world_size`. Raises ConfigError when the stages would not have
        `tensor_size` ranks each, or these would not be `data_size` equal groups."""
        if world_size % tensor_size:
            raise ConfigError(
                f"{world_size} processes (--world-size) are no stages of {tensor_size} ranks (--tp)",
                field="tp",
            )
        if tensor_size % data_size:
            raise ConfigError(
                f"{tensor_size} ranks (--tp) are no {data_size} equal groups (--dp-attention)",
                field="dp_attention",
            )
        return cls(
            rank // tensor_size,
            world_size // tensor_size,
            TensorRank(rank % tensor_size, tensor_size, data_size),
        )

    def __str__(self) -> str:
        """For people: "stage 1", or "rank 0 of stage 1" where it has several."""
        stage = f"stage {self.pipeline_rank}"
        return stage if self.tensor.size == 1 else f"rank {self.tensor.rank} of {stage}"

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def draws(self) -> bool:
        """Whether it draws the tokens of its data rank."""
        return self.is_last_stage and self.tensor.attention.rank == 0


def get_pp_indices(
    num_layers: int, rank: int, size: int, partition: str | None = None
) -> LayerRange:
    """The layers of stage `rank` of `size`.

    Without `partition` every stage gets `num_layers // size` layers and the *last* `num_layers %
    size` stages one more. `partition` names the counts itself ("10,11,11"); a pool of one stage
    ignores it, so that a draft model built inside a partitioned pool is whole.

    Raises:
        ConfigError: more stages than layers, or a partition that is not `size` positive integers
            summing to `num_layers`.
    """
    if not 0 <= rank < size:
        raise ConfigError(
            f"pipeline rank must be in 0..{size - 1}, got {rank}", field="pipeline_rank"
        )
    if size > num_layers:
        raise ConfigError(
            f"{size} pipeline stages need at least {size} layers, the model has {num_layers}",
            field="pipeline_size",
        )
    if partition and size > 1:
        counts = _parse_partition(partition, num_layers, size)
    else:
        base, extra = divmod(num_layers, size)
        counts = [base + (stage >= size - extra) for stage in range(size)]
    start = sum(counts[:rank])
    return LayerRange(start, start + counts[rank])


def balanced_counts(costs: Sequence[float], size: int) -> tuple[int, ...]:
    """How many layers of these costs each of `size` stages gets, at least one each, so that the
    dearest stage costs least; of several such ways the one whose first stages are shortest.

    Raises:
        ConfigError: more stages than layers.
    """
    if not 1 <= size <= len(costs):
        raise ConfigError(
            f"{size} pipeline stages need at least {size} layers, the model has {len(costs)}",
            field="pipeline_size",
        )
    until = [0.0, *accumulate(costs)]
    # Of the last layers from `first` on in so many stages: the dearest stage's cost, and the
    # counts.
    ways: dict[int, tuple[float, tuple[int, ...]]] = {
        first: (until[-1] - until[first], (len(costs) - first,)) for first in range(len(costs))
    }
    for num_stages in range(2, size + 1):
        ways = {
            first: min(
                (max(until[end] - until[first], ways[end][0]), (end - first, *ways[end][1]))
                for end in range(first + 1, len(costs) - num_stages + 2)
            )
            for first in range(len(costs) - num_stages + 1)
        }
    return ways[0][1]


def _parse_partition(partition: str, num_layers: int, size: int) -> list[int]:
    try:
        counts = [int(part) for part in partition.split(",")]
    except ValueError:
        raise ConfigError(
            f"layer partition must be comma-separated integers, got {partition!r}",
            field="partition",
        ) from None
    if len(counts) != size:
        raise ConfigError(
            f"layer partition {partition!r} names {len(counts)} stages, the pool has {size}",
            field="partition",
        )
    if min(counts) < 1:
        raise ConfigError(
            f"layer partition {partition!r} has a stage without layers", field="partition"
        )
    if sum(counts) != num_layers:
        raise ConfigError(
            f"layer partition {partition!r} sums to {sum(counts)}, the model has {num_layers} layers",
            field="partition",
        )
    return counts
