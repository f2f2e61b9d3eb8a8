"""Random weights, for benchmarks and tests without a checkpoint."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.layer_range import Part


class RandomWeights:
    """Repeatable random tensors of any name and shape; a `PartSource`.

    They are generated on the host, so every device has the same ones.
    """

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def has(self, name: str) -> bool:
        # Experts are stored one by one, not stacked.
        return ".experts." not in name or name.rsplit(".", 1)[1] == "weight"

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        if "norm" in name:
            out.fill_(1.0)
            return
        seed = zlib.crc32(f"{name}{item or ''}".encode()) ^ self._seed
        generator = torch.Generator().manual_seed(seed)
        # Always generated in fp32: per dtype, torch fills the end of a tensor of odd size by
        # another rule.
        out.copy_(
            torch.empty(out.shape, dtype=torch.float32).normal_(
                0.0, out.shape[-1] ** -0.5, generator=generator
            )
        )

    def row_scales(self, name: str, *, item: int | None = None) -> None:
        """Implement `WeightSource.row_scales`: there are none."""

    def read_rows(
        self, name: str, out: Tensor, rows: Sequence[Part], columns: Part | None = None
    ) -> None:
        """Implement `PartSource.read_rows`."""
        shape = [rows[0].total, *out.shape[1:]]
        if columns is not None:
            shape[-1] = columns.total
        whole = torch.empty(shape, dtype=out.dtype)
        self.read(name, whole)
        kept = torch.cat([whole[part.start : part.stop] for part in rows])
        out.copy_(kept if columns is None else kept[..., columns.start : columns.stop])

    def skip(self, name: str, item: int | None = None) -> None:
        """Implement `PartSource.skip`."""
