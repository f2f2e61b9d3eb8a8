"""A process that runs every host kernel once and prints a digest of what came out."""

import hashlib

import torch

from engine.kernels.host.causal_conv import causal_conv
from engine.kernels.host.compiled import Team
from engine.kernels.host.delta_rule import DeltaInputs, delta_chunks, delta_steps
from engine.kernels.host.in_place import attend_in_place
from engine.kernels.host.index_scores import select_keys
from engine.kernels.host.latent import attend_latent
from engine.kernels.host.token_passes import rms_norm, rotate_halves
from engine.kernels.latent_rows import LatentRows
from engine.kernels.recurrent_rows import RecurrentRows, StateSteps
from engine.kernels.rows_in_place import RowsInPlace


def recurrent_outputs(generator: torch.Generator, team: Team) -> list[torch.Tensor]:
    rows = RecurrentRows(torch.tensor([0, 40]), torch.tensor([1]), torch.tensor([1]))
    inputs = DeltaInputs(*torch.randn(3, 40, 2, 20, generator=generator), *torch.rand(2, 40, 2, generator=generator))
    steps = StateSteps(torch.arange(-1, 39), torch.arange(40))
    taps, pool = torch.randn(4, 40, generator=generator), torch.zeros(2, 3, 40)
    return [delta_chunks(inputs, rows, torch.zeros(2, 2, 20, 20), team),
            delta_steps(inputs, rows, steps, torch.zeros(2, 2, 20, 20), torch.empty(40, 2, 20, 20), team),
            causal_conv(inputs.v.flatten(1), taps, pool, rows, team)]


def latent_outputs(generator: torch.Generator, team: Team) -> list[torch.Tensor]:
    pages, q = torch.randn(9, 16, 40, generator=generator), torch.randn(2, 20, 40, generator=generator)
    rows = LatentRows(starts=torch.tensor([0, 2]), contexts=torch.tensor([101]), token_rows=torch.tensor([0, 0]),
                      tables=torch.arange(1, 9, dtype=torch.int32).view(1, 8), num_common=torch.tensor([102, 103]),
                      listed=torch.empty(2, 0, dtype=torch.int32))
    return [attend_latent(pages, q, rows, latent_dim=24, scale=0.2, team=team),
            select_keys(pages, q, torch.rand(2, 20, generator=generator), rows, count=30, team=team)]


def main() -> None:
    generator, team = torch.Generator().manual_seed(1), Team()
    pages = torch.randn(9, 2, 2, 16, 32, generator=generator)
    x = torch.randn(40, 4, 32, generator=generator)  # narrow rows leave most to how their loops begin and end
    angle = torch.randn(40, 1, 16, generator=generator)
    queries = torch.randn(3, 4, 32, generator=generator)
    rows = RowsInPlace(tables=torch.arange(1, 9, dtype=torch.int32).view(2, 4),
                       tiles=torch.tensor([[0, 0, 1], [1, 1, 2]], dtype=torch.int32),
                       positions=torch.tensor([37, 50, 51], dtype=torch.int32),
                       num_in_order=torch.tensor([38, 52], dtype=torch.int32),
                       paths=torch.empty(3, 0, dtype=torch.long), longest_tile=2)
    outputs = [*(rms_norm(x, x[0, 0].contiguous(), 1e-6, team, rounds_first=first) for first in (True, False)),
               rotate_halves(x, angle.cos(), angle.sin(), team), attend_in_place(pages, queries, rows, 0.2, team),
               *recurrent_outputs(generator, team), *latent_outputs(generator, team)]
    print(*(hashlib.sha256(output.numpy().tobytes()).hexdigest()[:16] for output in outputs))


if __name__ == "__main__":
    main()
