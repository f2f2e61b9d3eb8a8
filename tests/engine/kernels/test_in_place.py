"""The host's kernel: what it computes, and what happens when it cannot."""

from pathlib import Path

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.host.in_place import attend_in_place, compiled_for
from engine.kernels.host.team import Team
from engine.kernels.rows_in_place import RowsInPlace
from runtime.errors import InternalError


class Idle(Team):
    """Threads that do not get to it, as when a thread finds no memory for its scores."""

    def run(self, function: int, argument: int, *, num_parts: int) -> None:
        pass


def rows_of(contexts: list[int], counts: list[int], page_size: int) -> RowsInPlace:
    """Rows on pages of their own, in descending order, page 0 left out."""
    width = max(-(-(context + count) // page_size) for context, count in zip(contexts, counts, strict=True)) or 1
    tables = torch.arange(len(contexts) * width, 0, -1, dtype=torch.int32).view(len(contexts), width)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    return RowsInPlace(starts, torch.tensor(contexts, dtype=torch.int32), tables)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(dtype=st.sampled_from([torch.bfloat16, torch.float32]), page_size=st.sampled_from([1, 16, 64]),
       num_kv_heads=st.integers(1, 3), share=st.integers(1, 8), head_dim=st.sampled_from([4, 24, 64, 128, 200]),
       rows=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 5)), min_size=1, max_size=4))
def test_it_computes_the_definition_from_what_is_written_alone(
    dtype: torch.dtype, page_size: int, num_kv_heads: int, share: int, head_dim: int, rows: list[tuple[int, int]]
) -> None:
    contexts, counts = [context for context, _ in rows], [count for _, count in rows]
    plan = rows_of(contexts, counts, page_size)
    generator = torch.Generator().manual_seed(head_dim)
    pages = torch.full((plan.tables.numel() + 1, 2, num_kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    queries = torch.randn(sum(counts), num_kv_heads, share, head_dim, generator=generator)
    expected, first = torch.empty_like(queries, dtype=torch.float64), 0
    for table, context, count in zip(plan.tables.long(), contexts, counts, strict=True):
        num_keys = context + count
        cached = torch.randn(2, num_kv_heads, num_keys, head_dim, generator=generator).to(dtype)
        for key in range(num_keys):
            pages[table[key // page_size], :, :, key % page_size] = cached[:, :, key]
        keys, values = cached.double()
        for token in range(count):
            seen = context + token + 1
            scores = queries[first + token].double() @ keys[:, :seen].transpose(1, 2)
            expected[first + token] = scores.softmax(-1) @ values[:, :seen]
        first += count
    out = attend_in_place(pages, queries, plan, Team())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_was_not_computed_is_an_error_and_no_answer() -> None:
    pages, queries = torch.zeros(3, 2, 2, 16, 8), torch.zeros(2, 2, 1, 8)
    with pytest.raises(InternalError, match="a kernel ended after 0 of 4 parts"):
        attend_in_place(pages, queries, rows_of([3, 5], [1, 1], 16), Idle())


def test_damaged_files_of_an_earlier_process_are_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compile_anew = compiled_for.__wrapped__
    compile_anew(torch.float32)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    for path in kept:
        path.write_bytes(path.read_bytes()[:20])
    assert compile_anew(torch.float32).address
