"""Attention of few new tokens on the host, over pages where they lie. Compiled by numba, kept for the next process.

torch multiplies tensors, so a row's keys must be gathered before: each byte is read, written and read again. Here it is
read once. A token's bits depend on its row's keys and on nothing else: not on the batch, not on how many tokens its row
brings, not on the number of threads.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from engine.kernels.host.compiled import (
    DONE,
    NEXT,
    PART,
    STORED_AS,
    compile_kernel,
    count_up,
    launch,
    pointer_to,
    record,
    wide,
)
from engine.kernels.host.team import Team
from engine.kernels.rows_in_place import RowsInPlace

_ARGUMENTS = record("num_rows", "num_tokens", "num_kv_heads", "share", "head_dim", "page_size", "num_pages",
                    "table_width", "pages", "queries", "starts", "contexts", "tables", "out")


def attend_in_place(pages: Tensor, queries: Tensor, rows: RowsInPlace, team: Team) -> Tensor:
    """Softmax attention, causal within each row.

    pages: [P, 2 (k, v), num_kv_heads, page_size, D] bf16 or fp32, contiguous; queries: [T, num_kv_heads, heads per kv
    head, D] fp32, scaled, contiguous. Returns fp32 in the queries' shape.

    Raises:
        InternalError: not all of it was computed, because there was no memory for the scores.
    """
    out = torch.empty_like(queries)
    arguments = np.zeros(1, _ARGUMENTS)
    a = arguments[0]
    a["num_rows"], a["table_width"] = rows.tables.shape
    a["num_tokens"], a["num_kv_heads"], a["share"], a["head_dim"] = queries.shape
    a["num_items"] = a["num_rows"] * a["num_kv_heads"]
    a["num_pages"], a["page_size"] = pages.shape[0], pages.shape[3]
    a["pages"], a["queries"], a["out"] = pages.data_ptr(), queries.data_ptr(), out.data_ptr()
    a["starts"], a["contexts"], a["tables"] = rows.starts.data_ptr(), rows.contexts.data_ptr(), rows.tables.data_ptr()
    launch(compiled_for(pages.dtype), arguments, team)
    return out


@cache
def compiled_for(dtype: torch.dtype):
    """The kernel for pages of this type."""
    stored = STORED_AS[dtype]

    def work(pointer):
        _take_rows(pointer, stored)

    return compile_kernel(work, _ARGUMENTS, f"attend_{stored.__name__}", __file__)


@njit(**PART)
def _take_rows(pointer, stored):
    """One thread's part: a row's heads of one kv head at a time, until none is left."""
    a = carray(pointer, 1)[0]
    pages = carray(pointer_to(a.pages, stored), (a.num_pages, 2, a.num_kv_heads, a.page_size, a.head_dim))
    shape = (a.num_tokens, a.num_kv_heads, a.share, a.head_dim)
    queries, out = carray(pointer_to(a.queries, np.float32), shape), carray(pointer_to(a.out, np.float32), shape)
    starts = carray(pointer_to(a.starts, np.int32), a.num_rows + 1)
    contexts = carray(pointer_to(a.contexts, np.int32), a.num_rows)
    tables = carray(pointer_to(a.tables, np.int32), (a.num_rows, a.table_width))
    while True:
        item = count_up(pointer, NEXT)
        if item >= a.num_items:
            return
        row, kv_head = item // a.num_kv_heads, item % a.num_kv_heads
        _attend(pages, kv_head, queries, starts[row], starts[row + 1], contexts[row], tables[row], out)
        count_up(pointer, DONE)


@njit(**PART)
def _attend(pages, kv_head, queries, start, end, context, table, out):
    """Tokens start..end-1 of a row, the first of which sees one key more than `context`. A page serves them all while
    it is in the cache."""
    page_size, num_keys = pages.shape[3], context + end - start
    scores = np.empty((end - start, queries.shape[2], num_keys), np.float32)
    for first in range(0, num_keys, page_size):
        keys = pages[table[first // page_size], 0, kv_head]
        for token in range(start, end):
            last = min(first + page_size, context + token - start + 1)
            _score(keys, queries[token, kv_head], scores[token - start], first, last)
    for token in range(start, end):
        out[token, kv_head] = 0
        for head in range(queries.shape[2]):
            _softmax(scores[token - start, head], context + token - start + 1)
    for first in range(0, num_keys, page_size):
        values = pages[table[first // page_size], 1, kv_head]
        for token in range(start, end):
            last = min(first + page_size, context + token - start + 1)
            _add_up(values, scores[token - start], first, last, out[token, kv_head])


@njit(**PART)
def _score(keys, queries, scores, first, last):
    """The keys first..last-1 of a row, which are a page's first ones."""
    for key in range(first, last):
        for head in range(len(queries)):
            score = np.float32(0)
            for channel in range(queries.shape[1]):
                score += wide(keys[key - first, channel]) * queries[head, channel]
            scores[head, key] = score


@njit(**PART)
def _softmax(scores, num_keys):
    highest, total = np.float32(-np.inf), np.float32(0)
    for key in range(num_keys):
        highest = max(highest, scores[key])
    for key in range(num_keys):
        scores[key] = np.exp(scores[key] - highest)
        total += scores[key]
    for key in range(num_keys):
        scores[key] /= total


@njit(**PART)
def _add_up(values, weights, first, last, out):
    for key in range(first, last):
        for head in range(len(out)):
            weight = weights[head, key]
            for channel in range(out.shape[1]):
                out[head, channel] += weight * wide(values[key - first, channel])
