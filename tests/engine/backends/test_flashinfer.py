"""The FlashInfer adapter keeps the contract over wrappers that can be computed by hand."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.backends.cuda import wrappers
from engine.backends.cuda.flashinfer import FlashInferAttention
from engine.backends.cuda.wrappers import (
    WORKSPACE_BYTES,
    FlashInferWrappers,
    LengthsBesideMask,
    Workspace,
)
from engine.contracts.attention import AttentionGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecInfo, SpecRow
from engine.core.numerics import Numerics
from engine.graphs.buckets import extend_buckets, padding_alone, verify_buckets
from runtime.errors import ConfigError, InternalError, StalePlanError
from tests.support.contracts.attention import GEOMETRY, AttentionContract, TreeContract, close
from tests.support.kernels.attention import (
    LAYER,
    dense,
    feed,
    make_prompt,
    poisoned_pool,
    tree_info,
)
from tests.support.kernels.batches import Row, make_batch
from tests.support.kernels.flashinfer import FakeDecode, FakeWrappers

CPU = torch.device("cpu")


def scatter(pool: Tensor, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    pool[pages, 0, :, offsets], pool[pages, 1, :, offsets] = k, v


def make(
    geometry: AttentionGeometry, pool: Tensor, made_by: FakeWrappers | None = None
) -> FlashInferAttention:
    return FlashInferAttention(
        kv_pools={LAYER: pool},
        geometry=geometry,
        wrappers=made_by or FakeWrappers(),
        device=CPU,
        write_kv=scatter,
    )


class TestFlashInfer(AttentionContract, TreeContract):
    def make(self, geometry: AttentionGeometry, pool: Tensor) -> FlashInferAttention:
        return make(geometry, pool)


def decode_batch(*contexts: int) -> ForwardBatch:
    return make_batch(
        ForwardMode.DECODE, [Row(1, context, (row + 1,)) for row, context in enumerate(contexts)]
    )


def run(backend: FlashInferAttention, batch: ForwardBatch) -> Tensor:
    count = batch.num_tokens
    kv = torch.ones(count, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    return backend.run(
        LAYER, torch.ones(count, GEOMETRY.num_heads, GEOMETRY.head_dim), kv, kv, batch
    )


def test_a_batch_may_be_planned_while_the_one_before_it_still_runs() -> None:
    pool = torch.zeros(9, 2, GEOMETRY.num_kv_heads, GEOMETRY.page_size, GEOMETRY.head_dim)
    backend = make(GEOMETRY, pool)
    first, second = decode_batch(3), decode_batch(5, 7)
    backend.plan(first)
    backend.plan(second)
    assert run(backend, first).shape[0] == 1
    assert run(backend, second).shape[0] == 2


def test_a_wrapper_that_was_planned_for_another_batch_is_never_run() -> None:
    backend = make(GEOMETRY, poisoned_pool(9, GEOMETRY))
    first, *others = (decode_batch(3) for _ in range(3))
    for batch in (first, *others):
        backend.plan(batch)
    with pytest.raises(StalePlanError, match="another batch since"):
        run(backend, first)


def test_kinds_do_not_disturb_each_other() -> None:
    backend = make(
        GEOMETRY, torch.zeros(9, 2, GEOMETRY.num_kv_heads, GEOMETRY.page_size, GEOMETRY.head_dim)
    )
    first = decode_batch(3)
    backend.plan(first)
    for _ in range(3):
        backend.plan(make_batch(ForwardMode.PREFILL, [Row(4, 0, (2,))]))
    assert run(backend, first).shape[0] == 1


def test_decode_takes_the_decode_wrapper_and_layers_share_one_plan() -> None:
    wrappers = FakeWrappers()
    pools = {
        layer: torch.zeros(4, 2, GEOMETRY.num_kv_heads, GEOMETRY.page_size, GEOMETRY.head_dim)
        for layer in range(3)
    }
    backend = FlashInferAttention(
        kv_pools=pools, geometry=GEOMETRY, wrappers=wrappers, device=CPU, write_kv=scatter
    )
    batch = decode_batch(3)
    backend.plan(batch)
    kv = torch.ones(1, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    for layer in pools:
        backend.run(layer, torch.ones(1, GEOMETRY.num_heads, GEOMETRY.head_dim), kv, kv, batch)
    planned = [made for made in wrappers.made if made.num_plans]
    assert [type(wrapper) for wrapper in planned] == [FakeDecode]
    assert planned[0].num_plans == 1


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, 0, 0, 1), (-1, 0, 1, 0, 2, 3)])
def test_trees_of_a_batch_become_the_mask(parents: tuple[int, ...]) -> None:
    prompt = make_prompt(20 + len(parents), GEOMETRY, pages=(1, 2, 3), seed=5)
    backend = make(GEOMETRY, poisoned_pool(9, GEOMETRY))
    feed(backend, ForwardMode.PREFILL, (prompt, 20))
    info = SpecInfo(torch.zeros(len(parents), dtype=torch.long), (SpecRow(parents),))
    batch = make_batch(ForwardMode.VERIFY, [Row(len(parents), 20, prompt.pages)], spec_info=info)
    backend.plan(batch)
    out = backend.run(LAYER, prompt.q[20:], prompt.k[20:], prompt.v[20:], batch)
    visible = torch.ones(len(prompt.q), len(prompt.q), dtype=torch.bool).tril()
    for node in range(len(parents)):
        ancestor, path = node, set[int]()
        while ancestor >= 0:
            path.add(ancestor)
            ancestor = parents[ancestor]
        for other in range(len(parents)):
            visible[20 + node, 20 + other] = other in path
    close(out, dense(prompt, GEOMETRY, visible=visible)[20:])


def test_a_tree_of_another_size_than_its_row_is_refused() -> None:
    batch = make_batch(ForwardMode.VERIFY, [Row(2, 20, (1, 2))], spec_info=tree_info((-1, 0, 0)))
    with pytest.raises(InternalError, match="the tree of row 0 has 3 nodes, the row 2 new tokens"):
        make(GEOMETRY, poisoned_pool(9, GEOMETRY)).plan(batch)


def test_rows_without_tokens_are_not_planned() -> None:
    prompt = make_prompt(10, GEOMETRY, pages=(1,), seed=5)
    backend = make(GEOMETRY, poisoned_pool(9, GEOMETRY))
    batch = make_batch(ForwardMode.PREFILL, [Row(0, 12, (3,)), Row(10, 0, (1,)), Row(0, 0)])
    backend.plan(batch)
    close(backend.run(LAYER, prompt.q, prompt.k, prompt.v, batch), dense(prompt, GEOMETRY))


@pytest.mark.parametrize("num_kv_heads", [32, 8, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_there_is_room_for_partial_results(num_kv_heads: int, head_dim: int) -> None:
    geometry = AttentionGeometry(
        num_heads=32, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=16, scale=1.0
    )
    pool = torch.empty(2, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16)
    backend = make(geometry, pool)
    backend.plan(make_batch(ForwardMode.PREFILL, [Row(16, 0, (1,))]))
    buckets = (*verify_buckets(128, 16, is_masked=True), *extend_buckets(128, 16))
    backend.reserve(buckets)
    for bucket in buckets:
        backend.plan(padding_alone(bucket))


def test_exact_forwards_are_not_captured() -> None:
    """Their plans leave arbitrary memory in the surplus blocks of a captured kernel."""
    backend = FlashInferAttention(
        kv_pools={LAYER: poisoned_pool(9, GEOMETRY)},
        geometry=GEOMETRY,
        wrappers=FakeWrappers(),
        device=CPU,
        write_kv=scatter,
        numerics=Numerics.EXACT,
    )
    with pytest.raises(InternalError, match="exact numerics cannot be captured"):
        backend.reserve(verify_buckets(4, 4, is_masked=True))


def test_a_larger_workspace_takes_the_place_of_a_smaller_one() -> None:
    workspace = Workspace(CPU)
    smaller = workspace.holding(5)
    assert len(smaller) == WORKSPACE_BYTES
    larger = workspace.holding(WORKSPACE_BYTES + 1)
    assert len(larger) == WORKSPACE_BYTES + 1
    assert workspace.holding(7) is larger


@dataclass
class NotedLengths:
    """A `RaggedWrapper` that records the device of its lengths."""

    devices: set[str] = field(default_factory=set)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *heads: int,
        **options: object,
    ) -> None:
        self.devices = {
            lengths.device.type for lengths in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        }

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        return q


@pytest.mark.parametrize(("is_tree", "device"), [(True, "meta"), (False, "cpu")])
def test_lengths_are_on_the_masks_device_or_on_the_host_without_one(
    device: str, *, is_tree: bool
) -> None:
    made = NotedLengths()
    wrapper = LengthsBesideMask(made, torch.device("meta"))
    lengths = torch.zeros(3, dtype=torch.int32)
    wrapper.plan(
        lengths,
        lengths,
        lengths,
        lengths,
        4,
        2,
        16,
        16,
        custom_mask=torch.ones(1) if is_tree else None,
        causal=not is_tree,
        sm_scale=1.0,
        window_left=-1,
        q_data_type=torch.half,
        kv_data_type=torch.half,
        disable_split_kv=False,
    )
    assert made.devices == {device}


@pytest.mark.parametrize(
    ("group_size", "on_tensor_cores"), [(1, False), (3, False), (4, True), (6, True), (16, True)]
)
def test_decode_needs_no_kernel_that_flashinfer_lacks(
    monkeypatch: pytest.MonkeyPatch, group_size: int, *, on_tensor_cores: bool
) -> None:
    """CUDA cores: groups of 1, 2, 3, 4 and 8 in all versions that are allowed."""
    asked = list[bool]()
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=lambda workspace, layout, *, use_tensor_cores: (
            asked.append(use_tensor_cores)
        )
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(wrappers, "Workspace", lambda device: Workspace(CPU))
    FlashInferWrappers(torch.device("cuda")).decode(group_size=group_size)
    assert asked == [on_tensor_cores]


def test_without_a_cuda_device_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device.*device cpu"):
        FlashInferWrappers(CPU)


def test_without_flashinfer_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"needs FlashInfer.*extra `gpu`"):
        FlashInferWrappers(torch.device("cuda"))
