"""A process that runs host kernels once each and prints a digest of what came out: `kernel_bits.py
small large`."""

import hashlib
import sys
from collections.abc import Sequence

import torch

from engine.kernels.host.attention.mla import attend_latent
from engine.kernels.host.attention.paged_attention import attend_in_place
from engine.kernels.host.attention.sparse_index import select_keys
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.recurrent.causal_conv import causal_conv
from engine.kernels.host.recurrent.delta_rule import DeltaInputs, delta_chunks, delta_steps
from engine.kernels.host.tokens.norm_rope import rms_norm, rotate_halves
from engine.kernels.latent_rows import LatentRows
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps
from engine.kernels.rows_in_place import RowsInPlace

RECURRENT_ROWS = RecurrentRows(torch.tensor([0, 40]), torch.tensor([1]), torch.tensor([1]))
LATENT_ROWS = LatentRows(
    starts=torch.tensor([0, 2]),
    contexts=torch.tensor([101]),
    token_rows=torch.tensor([0, 0]),
    tables=torch.arange(1, 9, dtype=torch.int32).view(1, 8),
    num_common=torch.tensor([102, 103]),
    listed=torch.empty(2, 0, dtype=torch.int32),
)
ROWS = RowsInPlace(
    tables=torch.arange(1, 9, dtype=torch.int32).view(2, 4),
    tiles=torch.tensor([[0, 0, 1], [1, 1, 2]], dtype=torch.int32),
    positions=torch.tensor([37, 50, 51], dtype=torch.int32),
    num_in_order=torch.tensor([38, 52], dtype=torch.int32),
    paths=torch.empty(3, 0, dtype=torch.long),
    longest_tile=2,
)


class Inputs:
    """The same in every process. Narrow rows leave most to how their loops begin and end."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.delta = DeltaInputs(
            *torch.randn(3, 40, 2, 20, generator=generator),
            *torch.rand(2, 40, 2, generator=generator),
        )
        self.latents = torch.randn(9, 16, 40, generator=generator)
        self.latent_queries = torch.randn(2, 20, 40, generator=generator)
        self.pages = torch.randn(9, 2, 2, 16, 32, generator=generator)
        self.queries = torch.randn(3, 4, 32, generator=generator)
        self.x, self.angle = (
            torch.randn(40, 4, 32, generator=generator),
            torch.randn(40, 1, 16, generator=generator),
        )
        self.taps, self.weights = (
            torch.randn(4, 40, generator=generator),
            torch.rand(2, 20, generator=generator),
        )


def of_small_kernels(given: Inputs, team: Team) -> list[torch.Tensor]:
    steps = StateSteps(torch.arange(-1, 39), torch.arange(40))
    return [
        *(
            rms_norm(given.x, given.x[0, 0].contiguous(), 1e-6, team, rounds_first=first)
            for first in (True, False)
        ),
        rotate_halves(given.x, given.angle.cos(), given.angle.sin(), team),
        delta_steps(
            given.delta,
            RECURRENT_ROWS,
            steps,
            torch.zeros(2, 2, 20, 20),
            torch.empty(40, 2, 20, 20),
            team,
        ),
        causal_conv(
            given.delta.v.flatten(1), given.taps, torch.zeros(2, 3, 40), RECURRENT_ROWS, team
        ),
        select_keys(
            given.latents, given.latent_queries, given.weights, LATENT_ROWS, count=30, team=team
        ),
    ]


def of_large_kernels(given: Inputs, team: Team) -> list[torch.Tensor]:
    """Run kernels that each take seconds to compile."""
    return [
        attend_in_place(given.pages, given.queries, ROWS, 0.2, team),
        delta_chunks(given.delta, RECURRENT_ROWS, torch.zeros(2, 2, 20, 20), team),
        attend_latent(
            given.latents, given.latent_queries, LATENT_ROWS, latent_dim=24, scale=0.2, team=team
        ),
    ]


OF_KERNELS = {"small": of_small_kernels, "large": of_large_kernels}


def main(sizes: Sequence[str]) -> None:
    given, team = Inputs(), Team()
    outputs = [output for size in sizes for output in OF_KERNELS[size](given, team)]
    print(*(hashlib.sha256(output.numpy().tobytes()).hexdigest()[:16] for output in outputs))


if __name__ == "__main__":
    main(sys.argv[1:])
