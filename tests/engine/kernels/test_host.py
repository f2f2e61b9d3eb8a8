"""Norms and rotation on the host: the definitions in double precision, rounded to their types,
equal for every row; and keys and values in their pages."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from torch import Tensor

from engine.kernels.host.codegen.compiled import (
    DONE,
    NEXT,
    Team,
    compile_kernel,
    count_up,
    dense_tokens,
    launch_integers,
    record,
)
from engine.kernels.host.tokens.kv_writes import write_tokens
from engine.kernels.host.tokens.norm_rope import (
    add_and_norm,
    norm_and_rotate,
    rms_norm,
    rotate_halves,
)
from runtime.errors import InternalError

TYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 8), (3, 1024), (40, 100), (1, 3, 24), (33, 5, 128), (0, 2, 16)]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the middle columns of a wider tensor: dense tokens that are not contiguous."""
    generator = torch.Generator().manual_seed(len(shape))
    width = torch.Size(shape[1:]).numel()
    return (
        torch.randn(shape[0], width + 7, generator=generator)[:, 3 : 3 + width]
        .to(dtype)
        .view(shape)
    )


def within_a_step(actual: Tensor, expected: Tensor) -> None:
    """Check for at most one step of the type from the exact value."""
    spacing = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=2.1 * spacing, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rounds_first", [True, False])
def test_norm_is_the_definition(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rounds_first: bool,  # noqa: FBT001
) -> None:
    x = random_tensor(*shape, dtype=dtype)
    weight = (
        random_tensor(*shape[1:], 1).view(shape[1:]).to(dtype if rounds_first else torch.float32)
    )
    out = rms_norm(dense_tokens(x), weight.contiguous(), 1e-5, Team(), rounds_first=rounds_first)
    wide = x.double()
    unit = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    within_a_step(out, (unit.to(dtype).double() if rounds_first else unit) * weight.double())
    assert out.dtype == dtype


@pytest.mark.parametrize("shape", [(1, 8), (33, 1000), (0, 16)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_sum_and_its_norm_have_the_bits_of_one_after_the_other(
    shape: tuple[int, int], dtype: torch.dtype, *, rounds_first: bool
) -> None:
    x, other = random_tensor(*shape, dtype=dtype), random_tensor(*shape).mul(100).to(dtype)
    weight = torch.randn(shape[1])
    sums, normed = add_and_norm(x, other, weight, 1e-5, Team(), rounds_first=rounds_first)
    assert torch.equal(sums, x + other)
    assert torch.equal(normed, rms_norm(sums, weight, 1e-5, Team(), rounds_first=rounds_first))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (24, 5), (8, 1)])
def test_rotation_is_the_definition(dtype: torch.dtype, head_dim: int, half: int) -> None:
    x, angle = random_tensor(35, 3, head_dim, dtype=dtype), random_tensor(35, 1, half)
    cos, sin = (part.contiguous().to(dtype) for part in (angle.cos(), angle.sin()))
    out = rotate_halves(dense_tokens(x), cos, sin, Team())
    a, b = x[..., :half].double(), x[..., half : 2 * half].double()
    within_a_step(out[..., :half], a * cos - b * sin)
    within_a_step(out[..., half : 2 * half], b * cos + a * sin)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (72, 20), (8, 1)])
@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_norm_that_rotates_has_the_bits_of_one_after_the_other(
    dtype: torch.dtype, head_dim: int, half: int, *, rounds_first: bool
) -> None:
    x, angle = dense_tokens(random_tensor(35, 3, head_dim, dtype=dtype)), random_tensor(35, 1, half)
    cos, sin = (part.contiguous().to(dtype) for part in (angle.cos(), angle.sin()))
    weight = torch.randn(3, head_dim)
    both = norm_and_rotate(x, weight, 1e-5, cos, sin, Team(), rounds_first=rounds_first)
    normed = rms_norm(x, weight, 1e-5, Team(), rounds_first=rounds_first)
    assert torch.equal(both, rotate_halves(normed, cos, sin, Team()))
    assert (
        len(
            norm_and_rotate(
                x[:0], weight, 1e-5, cos[:0], sin[:0], Team(), rounds_first=rounds_first
            )
        )
        == 0
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_bits_depend_on_the_row_alone(dtype: torch.dtype) -> None:
    x, angle = random_tensor(37, 3, 72, dtype=dtype), random_tensor(37, 1, 36)
    cos, sin = (part.contiguous().to(dtype) for part in (angle.cos(), angle.sin()))
    weight = random_tensor(3, 72).contiguous().to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        normed, turned = (
            rms_norm(x, weight, 1e-6, Team(), rounds_first=True),
            rotate_halves(x, cos, sin, Team()),
        )
    finally:
        torch.set_num_threads(before)
    for row in range(37):
        here = slice(row, row + 1)
        assert torch.equal(rms_norm(x[here], weight, 1e-6, Team(), rounds_first=True), normed[here])
        assert torch.equal(rotate_halves(x[here], cos[here], sin[here], Team()), turned[here])


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 8, dtype=dtype)
    x[0, 3], x[1, 3] = float("nan"), float("inf")
    out = rms_norm(x, torch.ones(8, dtype=dtype), 1e-6, Team(), rounds_first=True)
    assert out[0].isnan().all()
    assert out[1, 3].isnan()


def test_tokens_of_another_shape_are_refused() -> None:
    with pytest.raises(InternalError, match="neither"):
        dense_tokens(torch.zeros(2, 3, 4, 5))


@pytest.mark.long
@pytest.mark.parametrize("size", ["small", "large"])
def test_compiled_and_cached_kernels_give_the_same_bits(tmp_path: Path, size: str) -> None:
    outputs, kept = [], []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-m", "tests.support.kernels.kernel_bits", size],
            check=True,
            text=True,
            capture_output=True,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        )
        outputs.append(run.stdout)
        kept.append(sorted(path.name for path in tmp_path.rglob("*.nbc")))
    assert kept[0], "what was compiled is kept"
    assert kept[0] == kept[1], "and nothing was compiled again"
    assert outputs[0] == outputs[1]


def test_damaged_files_of_an_earlier_process_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def compile_and_run() -> None:
        def work(pointer: object) -> None:  # the simplest of kernels
            count_up(pointer, NEXT)
            count_up(pointer, DONE)

        launch_integers(compile_kernel(work, record(), "count"), 1, (), Team())

    compile_and_run()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for path in kept:
        path.write_bytes(path.read_bytes()[:20])
    compile_and_run()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_tokens", "page_size"), [(1, 16), (35, 4)])
def test_tokens_go_to_their_pages_and_touch_nothing_else(
    dtype: torch.dtype, num_tokens: int, page_size: int
) -> None:
    together = torch.randn(num_tokens, 7, 24).to(dtype)
    k, v = together[:, 1:4], together[:, 4:]
    pages = torch.full((40, 2, 3, page_size, 24), float("nan"), dtype=dtype)
    expected = pages.clone()
    slots = torch.randperm(40 * page_size)[:num_tokens]
    write_pages, write_offsets = slots // page_size, slots % page_size
    expected[write_pages, 0, :, write_offsets], expected[write_pages, 1, :, write_offsets] = k, v
    write_tokens(k, v, pages, write_pages, write_offsets, Team())
    assert torch.equal(pages.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.parametrize(("num_heads", "width", "num_places"), [(2, 24, 5), (3, 16, 5), (3, 24, 4)])
def test_shapes_that_do_not_belong_together_are_refused(
    num_heads: int, width: int, num_places: int
) -> None:
    tokens, places = torch.zeros(5, num_heads, width), torch.zeros(num_places, dtype=torch.long)
    with pytest.raises(InternalError, match=r"for [45] places in pages of \(2, 3, 16, 24\)$"):
        write_tokens(tokens, tokens, torch.zeros(2, 2, 3, 16, 24), places, places, Team())
