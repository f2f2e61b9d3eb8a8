"""A process that runs every host kernel once and prints a digest of what came out."""

import hashlib

import torch

from engine.kernels.host.in_place import attend_in_place
from engine.kernels.host.rms_norm import rms_norm
from engine.kernels.host.rotate import rotate_halves
from engine.kernels.host.team import Team
from engine.kernels.rows_in_place import RowsInPlace


def main() -> None:
    generator, team = torch.Generator().manual_seed(1), Team()
    pages = torch.randn(9, 2, 2, 16, 32, generator=generator)
    x = torch.randn(40, 4, 32, generator=generator)  # narrow rows leave most to how their loops begin and end
    angle = torch.randn(40, 1, 16, generator=generator)
    queries = torch.randn(3, 2, 2, 32, generator=generator)
    rows = RowsInPlace(torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([37, 50], dtype=torch.int32),
                       torch.arange(1, 9, dtype=torch.int32).view(2, 4))
    outputs = [*(rms_norm(x, x[0, 0].contiguous(), 1e-6, team, rounds_first=first) for first in (True, False)),
               rotate_halves(x, angle.cos(), angle.sin(), team), attend_in_place(pages, queries, rows, team)]
    print(*(hashlib.sha256(output.numpy().tobytes()).hexdigest()[:16] for output in outputs))


if __name__ == "__main__":
    main()
