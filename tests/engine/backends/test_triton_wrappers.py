"""Our own wrappers give what FlashInfer's would, planned with the same arguments: each is computed
by hand in fp64."""

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.triton_wrappers import TritonWrappers, is_offered_by_flashinfer
from engine.contracts.attention import AttentionGeometry
from engine.core.numerics import HOST
from runtime.errors import InternalError
from tests.support.kernels.flashinfer import FakeWrappers

PAGE, NUM_PAGES, KV_HEADS = 4, 12, 2
SCALE, DTYPE = 0.3, torch.float32
QUERY_LENS, NUM_KEYS = (3, 1, 6), (9, 4, 38)  # the last row is longer than a block of keys
PAGES = (7, 2, 11, 5, 1, 3, 4, 6, 8, 9, 10, 0, 2, 5)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paging() -> tuple[Tensor, Tensor, Tensor]:
    """Return indptr, indices and last_page_len of the three rows."""
    return int32(0, 3, 4, 14), int32(*PAGES), int32(1, 4, 2)


def tensors(num_tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return queries, and pages whose unwritten places are NaN."""
    generator = torch.Generator().manual_seed(dim)
    cache = torch.randn(NUM_PAGES, 2, KV_HEADS, PAGE, dim, generator=generator)
    cache[11, :, :, 1:] = float(
        "nan"
    )  # the last page of the first row; of the last row it is a whole one
    return torch.randn(num_tokens, heads, dim, generator=generator), cache


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("masked", "window"), [(False, -1), (True, -1), (False, 5)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (6, 24)])
def test_ragged_rows(heads: int, dim: int, window: int, *, masked: bool) -> None:
    indptr, indices, last = paging()
    indices[-3] = 6  # page 11 belongs to the first row alone
    q, cache = tensors(sum(QUERY_LENS), heads, dim)
    parts = [
        torch.rand(count, keys, generator=torch.Generator().manual_seed(keys)) < 0.5
        for count, keys in zip(QUERY_LENS, NUM_KEYS, strict=True)
    ]
    for part in parts:
        part[:, 0] = True  # each token sees something
        part[0, 1:] = False
    mask = torch.cat([part.flatten() for part in parts]) if masked else None
    found = []
    for wrapper in (TritonWrappers(HOST).ragged(), FakeWrappers().ragged()):
        wrapper.plan(
            int32(0, 3, 4, 10),
            indptr,
            indices,
            last,
            heads,
            KV_HEADS,
            dim,
            PAGE,
            custom_mask=mask,
            causal=not masked,
            sm_scale=SCALE,
            window_left=window,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
            disable_split_kv=False,
        )
        found.append(wrapper.run(q, cache))
    close(*found)


@pytest.mark.parametrize("window", [-1, 7])
@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (6, 24)])
def test_one_query_per_row(heads: int, dim: int, window: int) -> None:
    indptr, indices, last = paging()
    indices[-3] = 6
    q, cache = tensors(3, heads, dim)
    found = []
    for wrapper in (
        TritonWrappers(HOST).decode(group_size=heads // 2),
        FakeWrappers().decode(group_size=heads // 2),
    ):
        wrapper.plan(
            indptr,
            indices,
            last,
            heads,
            KV_HEADS,
            dim,
            PAGE,
            sm_scale=SCALE,
            window_left=window,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
            disable_split_kv=False,
        )
        found.append(wrapper.run(q, cache))
    close(*found)


def test_run_needs_a_plan() -> None:
    with pytest.raises(InternalError, match="before it was planned"):
        TritonWrappers(HOST).ragged().run(*tensors(1, 2, 32))


@pytest.mark.parametrize(
    ("dim", "dtype", "offered"),
    [
        (128, torch.bfloat16, True),
        (64, torch.float16, True),
        (256, torch.bfloat16, True),
        (32, torch.bfloat16, False),
        (128, torch.float32, False),
    ],
)
def test_head_sizes_offered_by_flashinfer(dim: int, dtype: torch.dtype, *, offered: bool) -> None:
    geometry = AttentionGeometry(num_heads=4, num_kv_heads=2, head_dim=dim, page_size=16, scale=1.0)
    assert is_offered_by_flashinfer(geometry, dtype) is offered
