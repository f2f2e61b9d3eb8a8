"""Layer ranges of pipeline stages and tensor-parallel shards.

Layer ids are global. Only pools subtract `start`, internally.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from runtime.errors import ConfigError


@dataclass(frozen=True, order=True)
class LayerRange:
    """A half-open interval of global layer ids."""

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
        """Return the layers of both ranges; empty (start == end) if there are none."""
        start = max(self.start, other.start)
        return LayerRange(start, max(start, min(self.end, other.end)))


# Every sum has 8 segments (see `engine.kernels.host`), which are equal for multiples of 16 terms.
EIGHTHS = 8
EIGHTHS_GRID = 16


def eighth(num_terms: int) -> int:
    """Return the number of terms in each segment of a sum.

    Pairs stay together. The last segments have the remaining terms.
    """
    return -(-num_terms // EIGHTHS_GRID) * (EIGHTHS_GRID // EIGHTHS)


@dataclass(frozen=True)
class Part:
    """A half-open interval `start` to `stop` of `total` heads, columns or vocabulary tokens."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return len(self) == self.total

    def times(self, count: int) -> "Part":
        """Return the interval in units of which each present unit holds `count`."""
        return Part(self.start * count, self.stop * count, self.total * count)

    @classmethod
    def whole(cls, total: int) -> "Part":
        return cls(0, total, total)


@dataclass(frozen=True)
class TensorRank:
    """One of the ranks that share a stage.

    The ranks have the same layers, and a part of each layer. With several data ranks (`data_size`),
    consecutive ranks form a data rank. Each data rank has its own requests, whose attention and
    cache are divided only by its `attention` ranks.
    """

    rank: int = 0
    size: int = 1
    data_size: int = 1

    @property
    def attention(self) -> "TensorRank":
        """Return the rank's place within its data rank."""
        each = self.size // self.data_size
        return TensorRank(self.rank % each, each)

    @property
    def data_rank(self) -> int:
        return self.rank // (self.size // self.data_size)

    @property
    def every(self) -> tuple["TensorRank", ...]:
        """Return all ranks, including this one."""
        return tuple(replace(self, rank=rank) for rank in range(self.size))

    def part(self, total: int, what: str) -> Part:
        """Return this rank's part of `total` things. The first ranks may have one more.

        `what` names the things in errors, with the config's field.

        Raises:
            ConfigError: there are fewer things than ranks.
        """
        if total < self.size:
            raise ConfigError(
                f"--tp {self.size} leaves a rank without any of the {total} {what}", field="tp"
            )
        each, more = divmod(total, self.size)
        start = self.rank * each + min(self.rank, more)
        return Part(start, start + each + (self.rank < more), total)

    def parts(self, total: int, what: str) -> tuple[Part, ...]:
        """Return the `part` of every rank."""
        return tuple(rank.part(total, what) for rank in self.every)

    def eighths(self, total: int) -> Part | None:
        """Return this rank's part of the terms of a sum, in whole eighths of the sum.

        The last rank's part may be shorter. Return None if the number of ranks does not divide the
        eighths, or a rank would have no terms.
        """
        each = eighth(total) * (EIGHTHS // self.size)
        if EIGHTHS % self.size or each * (self.size - 1) >= total:
            return None
        return Part(self.rank * each, min((self.rank + 1) * each, total), total)

    def terms(self, total: int, what: str) -> Part:
        """Return this rank's part of values that are the terms of sums.

        It consists of eighths of the sum if possible. The ranks can then add up a part each.

        Raises:
            ConfigError: there are fewer terms than ranks.
        """
        if self.size == 1:
            return Part.whole(total)
        return self.eighths(total) or self.part(total, what)

    def shared_part(self, total: int, what: str) -> Part:
        """Return this rank's part; consecutive ranks share one if there are too few things.

        Raises:
            ConfigError: there are too few things, and their number does not divide the ranks.
        """
        if total >= self.size:
            return self.part(total, what)
        if self.size % total:
            raise ConfigError(
                f"--tp {self.size} is more than the {total} {what}, and no multiple of them",
                field="tp",
            )
        own = self.rank * total // self.size
        return Part(own, own + 1, total)


ONLY_RANK = TensorRank()  # the rank of a stage of one process


@dataclass(frozen=True)
class Placement:
    """The stage of a process in its pool, and its rank in the stage.

    Processes are numbered stage by stage.
    """

    pipeline_rank: int = 0
    pipeline_size: int = 1
    tensor: TensorRank = ONLY_RANK

    @classmethod
    def of(cls, rank: int, world_size: int, tensor_size: int, data_size: int = 1) -> "Placement":
        """Return the placement of process `rank` of `world_size`.

        Raises:
            ConfigError: the processes cannot form stages of `tensor_size` ranks, or these cannot
                form `data_size` equal groups.
        """
        if world_size % tensor_size:
            raise ConfigError(
                f"{world_size} processes (--world-size) do not form stages of {tensor_size} ranks (--tp)",
                field="tp",
            )
        if tensor_size % data_size:
            raise ConfigError(
                f"{tensor_size} ranks (--tp) do not form {data_size} equal groups (--dp-attention)",
                field="dp_attention",
            )
        return cls(
            rank // tensor_size,
            world_size // tensor_size,
            TensorRank(rank % tensor_size, tensor_size, data_size),
        )

    def __str__(self) -> str:
        """Return "stage 1", or "rank 0 of stage 1" if the stage has several ranks."""
        stage = f"stage {self.pipeline_rank}"
        return stage if self.tensor.size == 1 else f"rank {self.tensor.rank} of {stage}"

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def samples(self) -> bool:
        """Return whether this process samples the tokens of its data rank."""
        return self.is_last_stage and self.tensor.attention.rank == 0


def get_pp_indices(
    num_layers: int, rank: int, size: int, partition: str | None = None
) -> LayerRange:
    """Return the layers of stage `rank` of `size`.

    Without `partition` every stage gets `num_layers // size` layers, and the *last* `num_layers %
    size` stages get one more. `partition` gives the counts ("10,11,11"). A pool of one stage
    ignores it, so that a draft model inside a partitioned pool is whole.

    Raises:
        ConfigError: more stages than layers, or a partition that is not `size` positive integers
            with the sum `num_layers`.
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
    """Return the layer counts of `size` stages that minimize the cost of the costliest stage.

    Each stage gets at least one layer. Of several solutions the one with the shortest first stages
    wins.

    Raises:
        ConfigError: more stages than layers.
    """
    if not 1 <= size <= len(costs):
        raise ConfigError(
            f"{size} pipeline stages need at least {size} layers, the model has {len(costs)}",
            field="pipeline_size",
        )
    until = [0.0, *accumulate(costs)]
    # By first layer: the best division of the remaining layers into `num_stages` stages, as the
    # cost of the costliest stage and the layer counts.
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
