"""Memory of packed weights: tensors of any size side by side, released with the last of a block."""

import mmap
import weakref

import pytest
import torch

from engine.core.numerics import WeightFormat
from engine.kernels.host.codegen.compiled import Team
from engine.kernels.host.linear.packed_linear import PackedWeight
from engine.kernels.host.linear.weight_memory import WeightMemory

MIB = 1 << 20


def test_tensors_lie_apart_and_begin_at_cache_lines() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1,), (0, 7), (2, MIB, 3), (80 * MIB,), (4, 4, 4), (60 * MIB,)]
    tensors = [memory.empty(shape, dtype=torch.int8) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        assert (tensor == number).all()
        assert not tensor.numel() or tensor.data_ptr() % 64 == 0


def test_a_block_is_released_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = list[weakref.ref[mmap.mmap]]()
    create = mmap.mmap

    def created(*arguments: int, **options: int) -> mmap.mmap:
        block = create(*arguments, **options)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(mmap, "mmap", created)
    memory = WeightMemory()
    first, second = (memory.empty((100, MIB), dtype=torch.int8)[5:] for _ in range(2))
    third = memory.empty((80, MIB), dtype=torch.int8)
    assert len(blocks) == 2
    del memory, second
    assert [block() is None for block in blocks] == [False, False]
    del first
    assert [block() is None for block in blocks] == [True, False]
    third[-1].fill_(1)


@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_weights_are_the_same_there(weight_format: WeightFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 150, generator=generator).to(dtype)
    x = torch.randn(5, 150, generator=generator).to(dtype)
    memory = WeightMemory()
    memory.empty((37,), dtype=torch.uint8)
    found = PackedWeight(weight, None, Team(), weight_format=weight_format, allocate=memory.empty)
    expected = PackedWeight(weight, None, Team(), weight_format=weight_format)
    assert torch.equal(found.multiply(x), expected.multiply(x))
