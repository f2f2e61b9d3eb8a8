"""A stage as a GPU runs it, captured and eager. On CPU tensors FlashInfer's wrappers are computed
by hand and kernels run in Triton's interpreter; on a GPU everything is real."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.recurrent import DeviceRecurrent
from engine.backends.cuda.wrappers import FlashInferWrappers, WrapperFactory
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch, ForwardMode, GraphBucket, SamplingRow
from engine.core.draft_trees import SpecRow
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.graphs.buckets import decode_buckets
from engine.graphs.capture import Capture, CudaCapture
from engine.graphs.runner import StageGraphs
from engine.kernels.device.cache import write_kv
from engine.memory.layout import CacheKind
from engine.pipeline.stage_executor import StageExecutor
from models.loader import ModelDescription
from testing.batches import unmarked
from tests.support.device.capture import RecordingCapture
from tests.support.kernels.flashinfer import FakeWrappers
from tests.support.models.tiny_models import tiny

CPU = torch.device("cpu")
PAGE_SIZE, PAGES_EACH, NUM_SEQUENCES = 16, 4, 9
MAX_ROWS, NODES = 3, 4
SAMPLED = SamplingRow(SamplingParams(), position=0)


@dataclass
class DeviceStage:
    """One stage with pools of its own, all of NaN at first, null records too. With `buckets`
    forwards are captured."""

    model: ModelDescription
    layers: LayerRange
    buckets: Sequence[GraphBucket] = ()
    max_nodes: int = 0
    capture_layers: frozenset[int] = frozenset()
    device: torch.device = CPU

    def __post_init__(self) -> None:
        model = self.model.load_stage(
            self.layers,
            numerics=Numerics.EXACT,
            capture_layers=self.capture_layers,
            device=self.device,
        )
        self.wrappers: WrapperFactory = (
            FakeWrappers() if self.device == CPU else FlashInferWrappers(self.device)
        )
        self.pools: dict[tuple[int, CacheKind], Tensor] = {}
        for spec in self.model.cache_specs(PAGE_SIZE):
            if spec.layer_id in self.layers:
                count = NUM_SEQUENCES * PAGES_EACH + 1 if spec.kind.is_paged else NUM_SEQUENCES + 1
                self.pools[spec.layer_id, spec.kind] = torch.full(
                    (count, *spec.record_shape),
                    float("nan"),
                    dtype=getattr(torch, spec.dtype),
                    device=self.device,
                )
        geometry = self.model.attention_geometry(PAGE_SIZE)
        assert geometry is not None
        self.attention = FlashInferAttention(
            kv_pools=self.of(CacheKind.KV),
            geometry=geometry,
            wrappers=self.wrappers,
            device=self.device,
            write_kv=write_kv,
        )
        self.recurrent = DeviceRecurrent(
            conv_pools=self.of(CacheKind.CONV),
            state_pools=self.of(CacheKind.STATE),
            max_nodes=self.max_nodes,
            num_scratch=NUM_SEQUENCES + 1,
        )
        self.capture: Capture = (
            RecordingCapture([self.attention]) if self.device == CPU else CudaCapture(self.device)
        )
        self.graphs: StageGraphs | None = None
        if self.buckets:
            self.graphs = StageGraphs(
                model=model,
                attention=self.attention,
                recurrent=self.recurrent,
                buckets=self.buckets,
                capture=self.capture,
                device=self.device,
            )
            self.graphs.capture_all()
        self.executor = StageExecutor(
            model=model,
            attention=self.attention,
            recurrent=self.recurrent,
            caches=[self.recurrent],
            device=self.device,
            graphs=self.graphs,
        )

    def of(self, kind: CacheKind) -> dict[int, Tensor]:
        return {
            layer_id: pool for (layer_id, of_kind), pool in self.pools.items() if of_kind is kind
        }

    def owned(self) -> list[Tensor]:
        """Return everything but the null records, which padding may write."""
        return [pool[1:] for _, pool in sorted(self.pools.items())]


@dataclass
class Sequences:
    """The tokens that requests 0 to 8 bring, and where they stand."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    lengths: dict[int, int] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shuffled = torch.randperm(NUM_SEQUENCES * PAGES_EACH, generator=self.generator) + 1
        self._pages = shuffled.view(NUM_SEQUENCES, PAGES_EACH).tolist()

    def batch(
        self,
        mode: ForwardMode,
        counts: dict[int, int],
        *,
        parents: dict[int, tuple[int, ...]] | None = None,
        silent: Sequence[int] = (),
    ) -> ForwardBatch:
        """Build a batch of new tokens per request; with `parents` as trees. Requests of `silent`
        sample nothing."""
        rows = []
        for key, count in counts.items():
            spec = None if parents is None else SpecRow(parents[key], scratch=NUM_SEQUENCES - key)
            context = self.lengths.get(key, 0)
            tokens = torch.randint(256, (count,), generator=self.generator).tolist()
            pages = self._pages[key][: -(-(context + count) // PAGE_SIZE)]
            sampling = None if key in silent else SAMPLED
            adapter = self.adapters.get(key, "")
            rows.append(Row(key, tokens, context, pages, key + 1, sampling, spec, adapter=adapter))
        return build_batch(mode, rows)

    def advance(self, counts: dict[int, int]) -> None:
        for key, count in counts.items():
            self.lengths[key] = self.lengths.get(key, 0) + count


def run(stages: Sequence[DeviceStage], batch: ForwardBatch) -> StageOutput:
    """Run one batch through all stages."""
    output: StageOutput | None = None
    for index, stage in enumerate(stages):
        local = unmarked(batch)
        local.spec_info = batch.spec_info
        if index:
            local.token_ids = None
        output = stage.executor.run(local, output)
    assert output is not None
    return output


class Twins:
    """The same stages twice, captured and eager, fed the same."""

    def __init__(
        self,
        config: dict[str, object],
        *,
        cuts: Sequence[int] = (),
        buckets: Sequence[GraphBucket] = (),
        capture_layers: frozenset[int] = frozenset(),
        device: torch.device = CPU,
    ) -> None:
        model = tiny(config, "float32" if device == CPU else "bfloat16")
        bounds = [0, *cuts, model.facts.num_layers]
        ranges = [LayerRange(start, end) for start, end in pairwise(bounds)]
        self.sequences = Sequences()
        self.eager = [
            DeviceStage(model, layers, (), NODES, capture_layers, device) for layers in ranges
        ]
        self.captured = [
            DeviceStage(
                model, layers, buckets or decode_buckets(MAX_ROWS), NODES, capture_layers, device
            )
            for layers in ranges
        ]
        # Products of another number of rows may be summed in another order there.
        self._tolerance = 0.0 if device == CPU else 0.06

    def step(
        self,
        mode: ForwardMode,
        counts: dict[int, int],
        *,
        parents: dict[int, tuple[int, ...]] | None = None,
        silent: Sequence[int] = (),
    ) -> None:
        """Run one batch through both; verified nodes are dropped."""
        batch = self.sequences.batch(mode, counts, parents=parents, silent=silent)
        expected, actual = run(self.eager, batch), run(self.captured, batch)
        assert expected.logits is not None
        assert actual.logits is not None
        self._same(actual.logits, expected.logits)
        assert not expected.logits.isnan().any()
        assert actual.aux_hidden.keys() == expected.aux_hidden.keys()
        for layer_id, hidden in expected.aux_hidden.items():
            self._same(actual.aux_hidden[layer_id], hidden)
        for captured, eager in zip(self.captured, self.eager, strict=True):
            for left, right in zip(captured.owned(), eager.owned(), strict=True):
                self._same(left.nan_to_num(7.0), right.nan_to_num(7.0))
        if mode is not ForwardMode.VERIFY:
            self.sequences.advance(counts)

    def _same(self, actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=self._tolerance, atol=self._tolerance)

    def num_replays(self) -> int:
        return sum(stage.executor.num_forwards["graph"] for stage in self.captured)


def prefilled(twins: Twins, *lengths: int) -> Twins:
    twins.step(ForwardMode.PREFILL, dict(enumerate(lengths)))
    return twins
