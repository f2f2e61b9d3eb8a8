"""Latent attention on a device keeps the contract, over a wrapper that can be computed by hand and
kernels in Triton's interpreter."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.latent import DeviceLatentAttention
from engine.backends.cuda.latent_wrappers import FlashInferLatentWrappers
from engine.contracts.latent import LatentGeometry
from engine.core.batch import ForwardBatch, ForwardMode
from engine.kernels.device import latent as kernels
from runtime.errors import ConfigError, StalePlanError
from testing.batches import unmarked
from tests.support.contracts.latent import (
    GEOMETRY,
    LAYER,
    TREE,
    LatentContract,
    batch_of,
    over_poison,
    sequence,
    step,
)
from tests.support.kernels.flashinfer_latent import FakeLatentWrappers

CPU = torch.device("cpu")


def make(
    latent_pools: Mapping[int, Tensor],
    index_pools: Mapping[int, Tensor],
    geometry: LatentGeometry,
    wrappers: FakeLatentWrappers | None = None,
) -> DeviceLatentAttention:
    return DeviceLatentAttention(
        latent_pools=latent_pools,
        index_pools=index_pools,
        geometry=geometry,
        device=CPU,
        wrappers=wrappers or FakeLatentWrappers(),
        kernels=kernels,
    )


class TestDevice(LatentContract):
    exact = False
    length = 70  # kernels are interpreted

    def make(
        self,
        latent_pools: Mapping[int, Tensor],
        index_pools: Mapping[int, Tensor],
        geometry: LatentGeometry,
    ) -> DeviceLatentAttention:
        return make(latent_pools, index_pools, geometry)


def run(backend: DeviceLatentAttention, batch: ForwardBatch) -> Tensor:
    return backend.run(
        LAYER,
        torch.ones(batch.num_tokens, 4, GEOMETRY.entry_dim),
        torch.ones(batch.num_tokens, GEOMETRY.entry_dim),
        None,
        batch,
    )


def dense(wrappers: FakeLatentWrappers | None = None) -> DeviceLatentAttention:
    geometry = replace(GEOMETRY, max_selected=0)
    return make(
        {LAYER: torch.zeros(100, geometry.page_size, geometry.entry_dim)}, {}, geometry, wrappers
    )


def decode_batch(*contexts: int) -> ForwardBatch:
    return batch_of(
        {row: (context, 1) for row, context in enumerate(contexts)}, mode=ForwardMode.DECODE
    )


def test_a_batch_may_be_planned_while_the_one_before_it_still_runs() -> None:
    backend, first, second = dense(), decode_batch(3), decode_batch(5, 7)
    backend.plan(first)
    backend.plan(second)
    assert run(backend, first).shape[0] == 1
    assert run(backend, second).shape[0] == 2


def test_a_wrapper_that_was_planned_for_another_batch_is_never_run() -> None:
    backend = dense()
    first, *others = (decode_batch(3) for _ in range(3))
    for batch in (first, *others):
        backend.plan(batch)
    with pytest.raises(StalePlanError, match="another batch since"):
        run(backend, first)


def test_trees_and_choices_do_without_the_wrapper_and_disturb_none() -> None:
    wrappers = FakeLatentWrappers()
    backend, first = dense(wrappers), decode_batch(3)
    backend.plan(first)
    for _ in range(3):
        backend.plan(batch_of({0: (30, 3)}, mode=ForwardMode.VERIFY, spec_info=TREE))
    assert [wrapper.num_plans for wrapper in wrappers.made] == [1, 0]
    assert run(backend, first).shape[0] == 1
    choosing = FakeLatentWrappers()
    step(
        over_poison(partial(make, wrappers=choosing), is_sparse=True),
        batch_of({0: (0, 20)}),
        [sequence(1)],
        is_sparse=True,
    )
    assert [wrapper.num_plans for wrapper in choosing.made] == [0, 0]


def test_causal_order_is_listed_without_a_wrapper() -> None:
    inputs, prompt, following = (
        sequence(1, 40),
        batch_of({0: (0, 39)}),
        batch_of({0: (39, 1)}, mode=ForwardMode.DECODE),
    )

    def without(
        latents: Mapping[int, Tensor], index_keys: Mapping[int, Tensor], geometry: LatentGeometry
    ) -> DeviceLatentAttention:
        return DeviceLatentAttention(
            latent_pools=latents,
            index_pools=index_keys,
            geometry=geometry,
            device=CPU,
            wrappers=None,
            kernels=kernels,
        )

    listed, planned = over_poison(without), over_poison(make)
    for batch in (prompt, following):
        expected, _ = step(planned, unmarked(batch), [inputs], is_sparse=False)
        torch.testing.assert_close(step(listed, batch, [inputs], is_sparse=False)[0], expected)


def test_rows_without_tokens_are_not_planned() -> None:
    inputs = sequence(1)
    expected, _ = step(over_poison(make), batch_of({0: (0, 40)}), [inputs], is_sparse=False)
    empty = sequence(50)
    out, _ = step(
        over_poison(make),
        batch_of({2: (12, 0), 0: (0, 40), 1: (0, 0)}),
        [empty, inputs, empty],
        is_sparse=False,
    )
    torch.testing.assert_close(out, expected)
    nobody, idle = dense(), batch_of({2: (12, 0)})
    nobody.plan(idle)
    assert run(nobody, idle).shape == (0, 4, 24)


def test_without_a_cuda_device_or_flashinfer_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"needs a CUDA device.*device cpu"):
        FlashInferLatentWrappers(CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"needs FlashInfer.*extra `gpu`"):
        FlashInferLatentWrappers(torch.device("cuda"))
