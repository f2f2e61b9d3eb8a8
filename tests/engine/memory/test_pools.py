"""Pool tensors and their bytes: every view against the tensor it must be a window of."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.memory.layout import CacheKind, CacheSpec, PoolGeometry, bytes_per_page, bytes_per_slot
from engine.memory.pools import StagePools
from runtime.errors import ConfigError, InternalError
from transfer.agent.stage_transfer import PoolMemory

NUM_PAGES, NUM_SLOTS, PAGE_SIZE = 7, 4, 2
KINDS = [CacheKind.KV, CacheKind.CONV, CacheKind.STATE]


def hybrid_specs(num_layers: int, interval: int, dtype: str = "bfloat16") -> tuple[CacheSpec, ...]:
    """Return specs in which every `interval`-th layer attends and the others are recurrent."""
    item_bytes = 2 if dtype == "bfloat16" else 4
    specs: list[CacheSpec] = []
    for layer_id in range(num_layers):
        if layer_id % interval == interval - 1:
            specs.append(CacheSpec(layer_id, CacheKind.KV, (2, 3, PAGE_SIZE, 5), dtype, item_bytes))
        else:
            specs.append(CacheSpec(layer_id, CacheKind.CONV, (3, 6), dtype, item_bytes))
            specs.append(CacheSpec(layer_id, CacheKind.STATE, (2, 4, 3), "float32", 4))
    return tuple(specs)


def build(layers: LayerRange, *, dtype: str = "bfloat16", poison: bool = False) -> StagePools:
    specs = hybrid_specs(8, 4, dtype)
    return StagePools(PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, layers, specs), poison=poison)


def raw(tensor: Tensor) -> bytes:
    """Return the bytes in memory order, as integers of the same width."""
    same_width = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.contiguous().view(same_width).numpy().tobytes()


def stamp(pools: StagePools) -> None:
    for kind in KINDS:
        for tensor in pools.of_kind(kind).values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))


def test_a_stage_allocates_its_own_layers_only() -> None:
    pools = build(LayerRange(2, 5))
    assert (list(pools.kv), list(pools.conv), list(pools.state)) == ([3], [2, 4], [2, 4])
    assert pools.kv[3].shape == (NUM_PAGES, 2, 3, PAGE_SIZE, 5)
    assert pools.conv[2].shape == (NUM_SLOTS, 3, 6)
    assert pools.state[4].shape == (NUM_SLOTS, 2, 4, 3)
    assert (pools.kv[3].dtype, pools.conv[2].dtype, pools.state[2].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )


def test_pools_start_cleared() -> None:
    pools = build(LayerRange(0, 8))
    assert all(not tensor.any() for kind in KINDS for tensor in pools.of_kind(kind).values())


def test_s4_3_a_stage_may_own_no_attention_or_no_recurrent_layer() -> None:
    specs = hybrid_specs(4, 4)
    stages = [
        StagePools(PoolGeometry(PAGE_SIZE, NUM_PAGES, NUM_SLOTS, LayerRange(r, r + 1), specs))
        for r in range(4)
    ]
    assert [list(stage.kv) for stage in stages] == [[], [], [], [3]]
    assert [list(stage.state) for stage in stages] == [[0], [1], [2], []]
    assert [stage.num_bytes > 0 for stage in stages] == [True] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_s4_1_stage_bytes_sum_to_the_whole(size: int) -> None:
    bounds = [8 * rank // size for rank in range(size + 1)]
    stages = [build(LayerRange(*pair)) for pair in itertools.pairwise(bounds)]
    specs = hybrid_specs(8, 4)
    whole = NUM_PAGES * bytes_per_page(specs) + NUM_SLOTS * bytes_per_slot(specs)
    assert sum(stage.num_bytes for stage in stages) == whole
    tensors = [t for stage in stages for kind in KINDS for t in stage.of_kind(kind).values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == whole


@pytest.mark.parametrize("layer_id", [-1, 0, 1, 5, 7])
def test_s4_4_a_layer_of_another_stage_is_named_with_the_range(layer_id: int) -> None:
    pools = build(LayerRange(2, 5))
    with pytest.raises(
        InternalError, match=f"layer {layer_id} is not on this stage, which has layers 2-5"
    ):
        _ = pools.kv[layer_id]
    with pytest.raises(
        InternalError, match=f"layer {layer_id} is not on this stage, which has layers 2-5"
    ):
        pools.view(layer_id, CacheKind.KV, 0, 1)
    assert layer_id not in pools.kv


@pytest.mark.parametrize(
    ("layer_id", "kind"), [(2, CacheKind.KV), (3, CacheKind.STATE), (3, CacheKind.LATENT)]
)
def test_s4_4_a_local_layer_without_that_cache_is_named(layer_id: int, kind: CacheKind) -> None:
    pools = build(LayerRange(2, 5))
    for access in (lambda: pools.of_kind(kind)[layer_id], lambda: pools.view(layer_id, kind, 0, 1)):
        with pytest.raises(
            InternalError, match=rf"layer {layer_id} keeps no {kind} \(stage has layers 2-5\)"
        ):
            access()


def test_s4_4_first_and_last_local_layer_are_found() -> None:
    pools = build(LayerRange(3, 8))
    assert pools.kv[3].data_ptr() != pools.kv[7].data_ptr()
    assert (3 in pools.kv, 7 in pools.kv, len(pools.kv)) == (True, True, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_the_tensor_byte_for_byte(kind: CacheKind, dtype: str) -> None:
    pools = build(LayerRange(0, 8), dtype=dtype)
    stamp(pools)
    for layer_id, tensor in pools.of_kind(kind).items():
        for first in range(tensor.shape[0] + 1):
            for count in range(tensor.shape[0] - first + 1):
                view = pools.view(layer_id, kind, first, count)
                assert (view.format, view.itemsize, view.ndim, view.contiguous, view.readonly) == (
                    "B",
                    1,
                    1,
                    True,
                    False,
                )
                assert bytes(view) == raw(tensor[first : first + count])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_writing_a_view_writes_those_records_and_no_other(kind: CacheKind, dtype: str) -> None:
    pools, source = build(LayerRange(0, 8), dtype=dtype), build(LayerRange(0, 8), dtype=dtype)
    stamp(source)
    layer_id = 3 if kind is CacheKind.KV else 4
    pools.view(layer_id, kind, 1, 2)[:] = source.view(layer_id, kind, 1, 2)
    tensor = pools.of_kind(kind)[layer_id]
    assert torch.equal(tensor[1:3], source.of_kind(kind)[layer_id][1:3])
    assert not tensor[0].any()
    assert not tensor[3:].any()
    others = [t for k in KINDS for i, t in pools.of_kind(k).items() if (k, i) != (kind, layer_id)]
    assert not any(t.any() for t in others)


def test_a_view_outlives_its_pools() -> None:
    pools = build(LayerRange(0, 8))
    pools.kv[3].fill_(1.5)
    view = pools.view(3, CacheKind.KV, 1, 1)
    del pools
    assert np.frombuffer(view, dtype=np.uint16).tolist() == [0x3FC0] * (
        len(view) // 2
    )  # 1.5 in bfloat16


@pytest.mark.parametrize(
    ("first", "count"), [(-1, 1), (0, NUM_PAGES + 1), (NUM_PAGES, 1), (2, -1), (NUM_PAGES - 1, 2)]
)
def test_a_view_outside_the_pool_is_refused(first: int, count: int) -> None:
    with pytest.raises(InternalError, match=rf"kv records .* of layer 3 are outside 0-{NUM_PAGES}"):
        build(LayerRange(2, 5)).view(3, CacheKind.KV, first, count)


def test_slots_are_counted_apart_from_pages() -> None:
    pools = build(LayerRange(0, 8))
    assert len(pools.view(2, CacheKind.STATE, 0, NUM_SLOTS)) == NUM_SLOTS * 2 * 4 * 3 * 4
    with pytest.raises(InternalError, match=f"outside 0-{NUM_SLOTS}"):
        pools.view(2, CacheKind.STATE, NUM_SLOTS, 1)


def test_poison_fills_all_but_the_null_records() -> None:
    pools = build(LayerRange(0, 8), poison=True)
    for kind in KINDS:
        for tensor in pools.of_kind(kind).values():
            assert not tensor[0].any()
            assert tensor[1:].isnan().all()


def test_poison_of_given_records_leaves_the_others() -> None:
    pools = build(LayerRange(0, 8))
    pools.poison(page_ids=[0, 2, 5], slot_ids=[3])
    assert [bool(page.isnan().all()) for page in pools.kv[7]] == [
        i in (2, 5) for i in range(NUM_PAGES)
    ]
    assert not pools.kv[7][[0, 1, 3, 4, 6]].any()
    assert [bool(slot.isnan().all()) for slot in pools.state[0]] == [
        i == 3 for i in range(NUM_SLOTS)
    ]


def one_spec(
    spec: CacheSpec, *more: CacheSpec, num_pages: int = 2, num_slots: int = 0
) -> StagePools:
    return StagePools(
        PoolGeometry(PAGE_SIZE, num_pages, num_slots, LayerRange(0, 1), (spec, *more))
    )


def test_specs_that_cannot_be_allocated_are_refused() -> None:
    kv = CacheSpec(0, CacheKind.KV, (2, 1, 2, 4), "bfloat16", 2)
    with pytest.raises(ConfigError, match="kv of layer 0 cannot be stored as int4 of 1 bytes"):
        one_spec(CacheSpec(0, CacheKind.KV, (2, 1, 2, 4), "int4", 1))
    with pytest.raises(ConfigError, match="bfloat16 of 4 bytes"):
        one_spec(CacheSpec(0, CacheKind.KV, (2, 1, 2, 4), "bfloat16", 4))
    with pytest.raises(ConfigError, match="declared twice"):
        one_spec(kv, kv)
    with pytest.raises(ConfigError, match="num_pages of at least 1") as caught:
        one_spec(kv, num_pages=0)
    assert caught.value.field == "num_pages"
    with pytest.raises(ConfigError, match="num_slots of at least 1"):
        one_spec(CacheSpec(0, CacheKind.STATE, (1, 2, 2), "float32", 4))


def test_a_plain_model_needs_no_slots() -> None:
    pools = one_spec(CacheSpec(0, CacheKind.KV, (2, 1, 2, 4), "float16", 2))
    assert (len(pools.state), len(pools.conv), pools.kv[0].dtype) == (0, 0, torch.float16)


def test_bytes_are_for_host_memory_only() -> None:
    spec = CacheSpec(0, CacheKind.KV, (2, 1, 2, 4), "bfloat16", 2)
    pools = StagePools(PoolGeometry(PAGE_SIZE, 2, 0, LayerRange(0, 1), (spec,)), device="meta")
    with pytest.raises(InternalError, match="is on meta, which has no host bytes"):
        pools.view(0, CacheKind.KV, 0, 1)


def test_pools_match_the_transfer_layout() -> None:
    memory: PoolMemory = build(LayerRange(2, 5))
    assert memory.geometry.layers == LayerRange(2, 5)
