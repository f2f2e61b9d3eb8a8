"""Which drafted tokens stand: draw from the target at a node, walk on if the drawn token is a
child, else stop.

The draw at a node is the very call plain decoding would make there: same logits, same penalties,
and a random number keyed by (seed, position). So what is emitted equals plain decoding token for
token, whatever the tree holds; the tree only decides how many tokens one target pass yields. Needs
no draft probabilities.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecInfo
from engine.core.request import DrawnToken
from engine.sampling.sampler import Sampler, takes_maximum
from runtime.errors import InternalError


@dataclass
class Run:
    """What one row drew: a token at each accepted node. `row` is its place in the batch."""

    row: int
    accepted: list[int] = field(default_factory=list)
    tokens: list[DrawnToken] = field(default_factory=list)


def sampling_at(row: SamplingRow, path: Sequence[int]) -> SamplingRow:
    """How the token after the tokens of `path` is drawn, `row` being how the first of them is."""
    if not path:
        return row
    position = row.position + len(path)
    banned = row.banned_token_ids if position < row.banned_before else ()
    output = (
        None
        if row.output is None
        else replace(row.output, token_ids=(*row.output.token_ids, *path))
    )
    return replace(
        row,
        position=position,
        output=output,
        banned_token_ids=banned,
        banned_before=row.banned_before if banned else 0,
    )


def draw_runs(logits: Tensor | None, batch: ForwardBatch, sampler: Sampler) -> list[Run]:
    """One run per row that draws, in row order.

    logits: [N, vocab] fp32; of a VERIFY batch the rows of every node of the rows that draw, of
    other batches one row each. Rows that do not accept a node never look at its logits, which may
    be anything.

    Raises:
        InternalError: the model gave another number of rows.
    """
    drawing = [(index, row) for index, row in enumerate(batch.sampling) if row is not None]
    is_verify = batch.mode is ForwardMode.VERIFY
    counts = [batch.query_lens[index] if is_verify else 1 for index, _ in drawing]
    found = 0 if logits is None else logits.shape[0]
    if found != sum(counts):
        raise InternalError(
            f"{len(drawing)} rows draw from {sum(counts)} rows of logits, the model gave {found}"
        )
    if logits is None or not drawing:
        return []
    if not is_verify:
        tokens = sampler(logits, [row for _, row in drawing])
        return [Run(index, [0], [token]) for (index, _), token in zip(drawing, tokens, strict=True)]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    runs = [Run(index, [0]) for index, _ in drawing]
    if all(
        takes_maximum(row) and row.output is None for _, row in drawing
    ):  # whatever the path: one call for all
        known = sampler(
            logits,
            [row for (_, row), count in zip(drawing, counts, strict=True) for _ in range(count)],
        )
        _walk(
            runs,
            _children(batch),
            lambda walking: [known[starts[at] + runs[at].accepted[-1]] for at in walking],
        )
        return runs

    def draw(walking: Sequence[int]) -> list[DrawnToken]:
        rows = [
            sampling_at(drawing[at][1], [token.token_id for token in runs[at].tokens])
            for at in walking
        ]
        return sampler(logits[[starts[at] + runs[at].accepted[-1] for at in walking]], rows)

    _walk(runs, _children(batch), draw)
    return runs


def _walk(
    runs: Sequence[Run],
    children: Sequence[Mapping[tuple[int, int], int]],
    draw: Callable[[Sequence[int]], list[DrawnToken]],
) -> None:
    """All runs at once, to their ends. draw(walking): tokens at the last accepted nodes of the runs
    in these places."""
    walking = list(range(len(runs)))
    while walking:
        for index, token in zip(walking, draw(walking), strict=True):
            run = runs[index]
            run.tokens.append(token)
            child = children[run.row].get((run.accepted[-1], token.token_id))
            if child is not None:
                run.accepted.append(child)
        walking = [
            index for index in walking if len(runs[index].accepted) > len(runs[index].tokens)
        ]


def _children(batch: ForwardBatch) -> list[dict[tuple[int, int], int]]:
    """Per row: (node, token) to the child of that token; of equal children the first."""
    if not isinstance(batch.spec_info, SpecInfo):
        raise InternalError("a VERIFY batch needs its trees")
    tokens, start, found = batch.spec_info.token_ids.tolist(), 0, []
    for row, length in zip(batch.spec_info.rows, batch.query_lens, strict=True):
        known: dict[tuple[int, int], int] = {}
        for node in range(1, length):
            known.setdefault((row.parents[node], tokens[start + node]), node)
        found.append(known)
        start += length
    return found
