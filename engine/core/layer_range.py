"""Which layers a pipeline stage owns. Layer ids are global everywhere; only pools subtract `start`, inside."""

from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Placement:
    """A process's place in its pool: one index and size per axis. Only the pipeline axis is wider than 1 so far."""

    pipeline_rank: int = 0
    pipeline_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1


def get_pp_indices(num_layers: int, rank: int, size: int, partition: str | None = None) -> LayerRange:
    """The layers of stage `rank` of `size`.

    Without `partition` every stage gets `num_layers // size` layers and the *last* `num_layers % size` stages one
    more. `partition` names the counts itself ("10,11,11"); a pool of one stage ignores it, so that a draft model
    built inside a partitioned pool is whole.

    Raises:
        ConfigError: more stages than layers, or a partition that is not `size` positive integers summing to
            `num_layers`.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"pipeline rank must be in 0..{size - 1}, got {rank}", field="pipeline_rank")
    if size > num_layers:
        raise ConfigError(
            f"{size} pipeline stages need at least {size} layers, the model has {num_layers}", field="pipeline_size"
        )
    if partition and size > 1:
        counts = _parse_partition(partition, num_layers, size)
    else:
        base, extra = divmod(num_layers, size)
        counts = [base + (stage >= size - extra) for stage in range(size)]
    start = sum(counts[:rank])
    return LayerRange(start, start + counts[rank])


def _parse_partition(partition: str, num_layers: int, size: int) -> list[int]:
    try:
        counts = [int(part) for part in partition.split(",")]
    except ValueError:
        raise ConfigError(
            f"layer partition must be comma-separated integers, got {partition!r}", field="partition"
        ) from None
    if len(counts) != size:
        raise ConfigError(
            f"layer partition {partition!r} names {len(counts)} stages, the pool has {size}", field="partition"
        )
    if min(counts) < 1:
        raise ConfigError(f"layer partition {partition!r} has a stage without layers", field="partition")
    if sum(counts) != num_layers:
        raise ConfigError(
            f"layer partition {partition!r} sums to {sum(counts)}, the model has {num_layers} layers", field="partition"
        )
    return counts
