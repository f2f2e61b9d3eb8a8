"""A model's stages over one set of backends, and a few steps through them: prompts in chunks,
decoding, trees, commits.

With the device's backends on CPU tensors (wrappers computed by hand, kernels interpreted) the steps
are those of a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.assembly.backend_set import Backends, StageCaches, build_executor
from engine.assembly.cuda import DeviceBackends
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import AcceptedNodes, SpecRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import HOST
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.layout import PoolGeometry
from engine.memory.pools import StagePools
from engine.pipeline.records import pack_batch, unpack_batch
from engine.pipeline.stage_executor import StageExecutor
from models.loader import ModelDescription
from tests.support.kernels.flashinfer import FakeWrappers
from tests.support.kernels.flashinfer_latent import FakeLatentWrappers

PAGE, NUM_PAGES, NUM_SLOTS, MAX_NODES, NUM_SCRATCH = 16, 13, 3, 5, 3
_SAMPLED = SamplingRow(SamplingParams(), 0)
_TOKENS = torch.randint(3, 240, (2, 100), generator=torch.Generator().manual_seed(3)).tolist()
_PAGES = ((3, 1, 7, 5, 9, 11), (2, 8, 4, 6, 10, 12))


def device_backends(device: torch.device = HOST) -> DeviceBackends:
    return DeviceBackends(
        device, lambda geometry, pools: FakeWrappers(), lambda geometry, pools: FakeLatentWrappers()
    )


@dataclass(frozen=True)
class Step:
    mode: ForwardMode
    rows: tuple[Row, ...]

    def batch(self) -> ForwardBatch:
        return build_batch(self.mode, self.rows)


def _row(
    number: int,
    start: int,
    count: int,
    *,
    samples: bool,
    parents: tuple[int, ...] = (),
    accepted: AcceptedNodes | None = None,
) -> Row:
    spec = SpecRow(
        parents,
        accepted,
        _TOKENS[number][start + count],
        num_draft_tokens=MAX_NODES - 1,
        scratch=2 - number,
    )
    return Row(
        number + 1,
        _TOKENS[number][start : start + count],
        start,
        _PAGES[number],
        number + 1,
        _SAMPLED if samples else None,
        spec,
    )


STEPS = (
    Step(ForwardMode.PREFILL, (_row(0, 0, 64, samples=False),)),
    Step(ForwardMode.PREFILL, (_row(0, 64, 17, samples=True), _row(1, 0, 13, samples=True))),
    Step(ForwardMode.DECODE, (_row(0, 81, 1, samples=True), _row(1, 13, 1, samples=True))),
    Step(
        ForwardMode.VERIFY,
        (
            _row(0, 82, 5, samples=True, parents=(-1, 0, 0, 1, 2)),
            _row(1, 14, 3, samples=True, parents=(-1, 0, 1)),
        ),
    ),
    Step(
        ForwardMode.VERIFY,
        (
            _row(0, 85, 3, samples=True, parents=(-1, 0, 0), accepted=AcceptedNodes(82, (0, 2, 4))),
            _row(1, 16, 2, samples=True, parents=(-1, 0), accepted=AcceptedNodes(14, (0, 1))),
        ),
    ),
    Step(
        ForwardMode.VERIFY,
        (
            _row(0, 87, 1, samples=True, parents=(-1,), accepted=AcceptedNodes(85, (0, 2))),
            _row(1, 17, 1, samples=True, parents=(-1,), accepted=AcceptedNodes(16, (0,))),
        ),
    ),
)


def build_stages(
    description: ModelDescription,
    backends: Backends,
    *,
    cuts: Sequence[int],
    capture_layers: frozenset[int] = frozenset(),
) -> list[StageExecutor]:
    """Build a model cut before each layer of `cuts`."""
    return [
        build_stage(description, backends, LayerRange(start, end), capture_layers=capture_layers)[0]
        for start, end in pairwise([0, *cuts, description.facts.num_layers])
    ]


def build_stage(
    description: ModelDescription,
    backends: Backends,
    layers: LayerRange,
    *,
    capture_layers: frozenset[int] = frozenset(),
) -> tuple[StageExecutor, StagePools]:
    """Build a stage whose caches hold NaN, so that a read of anything unwritten shows."""
    geometry = PoolGeometry(PAGE, NUM_PAGES, NUM_SLOTS, layers, description.cache_specs(PAGE))
    pools = StagePools(geometry, device=str(backends.device), poison=True)
    runs_on = backends.of_stage(
        StageCaches.of_layers(pools, layers),
        description.attention_geometry(PAGE),
        description.latent_geometry(PAGE),
        max_nodes=MAX_NODES,
        num_scratch=NUM_SCRATCH,
    )
    model = description.load_stage(
        layers, numerics=backends.numerics, device=backends.device, capture_layers=capture_layers
    )
    return build_executor(model, runs_on, backends.device, None), pools


def logits_of(stages: Sequence[StageExecutor], step: Step) -> Tensor:
    """Run all stages, with the frames that travel between processes."""
    batch, output = step.batch(), StageOutput()
    for rank, stage in enumerate(stages):
        if rank:
            packet = pack_batch(1, batch, output)
            received = unpack_batch(
                replace(packet, tensors=tuple(tensor.to(HOST) for tensor in packet.tensors))
            )
            batch, output = received.batch, received.incoming
        output = stage.run(batch, output)
    assert output.logits is not None
    return output.logits
