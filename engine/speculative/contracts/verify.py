"""Acceptance of drafted tokens: sample from the target at a node, and move to a matching child.

The walk stops when the sampled token is no child of the node. Sampling at a node is the same call
as in plain decoding: the same logits, the same penalties, and a random number keyed by (seed,
position). So the output equals plain decoding token for token, for every tree. The tree
only decides how many tokens one target pass yields. No draft probabilities are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, SamplingRow
from engine.core.draft_trees import SpecInfo
from engine.core.request import SampledToken
from engine.sampling.sampler import Sampler, takes_maximum
from runtime.errors import InternalError


@dataclass
class AcceptedRun:
    """The sampled tokens of one row, one at each accepted node. `row` is its index in the batch."""

    row: int
    accepted: list[int] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)


def sampling_at(row: SamplingRow, path: Sequence[int]) -> SamplingRow:
    """Return the sampling row for the token after `path`, given the row for its first token."""
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


def sample_runs(logits: Tensor | None, batch: ForwardBatch, sampler: Sampler) -> list[AcceptedRun]:
    """Return one run per sampling row, in row order.

    `logits` is [N, vocab] fp32: in a VERIFY batch one row per node of the sampling rows, in other
    batches one row each. The logits of nodes that are not accepted are never read and may have any
    value.

    Raises:
        InternalError: the model returned another number of rows.
    """
    sampled = [(index, row) for index, row in enumerate(batch.sampling) if row is not None]
    is_verify = batch.mode is ForwardMode.VERIFY
    counts = [batch.query_lens[index] if is_verify else 1 for index, _ in sampled]
    found = 0 if logits is None else logits.shape[0]
    if found != sum(counts):
        raise InternalError(
            f"{len(sampled)} rows sample from {sum(counts)} rows of logits, the model returned {found}"
        )
    if logits is None or not sampled:
        return []
    if not is_verify:
        tokens = sampler(logits, [row for _, row in sampled])
        return [
            AcceptedRun(index, [0], [token])
            for (index, _), token in zip(sampled, tokens, strict=True)
        ]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    runs = [AcceptedRun(index, [0]) for index, _ in sampled]
    # Such tokens do not depend on the path, so one call samples all nodes.
    if all(takes_maximum(row) and row.output is None for _, row in sampled):
        known = sampler(
            logits,
            [row for (_, row), count in zip(sampled, counts, strict=True) for _ in range(count)],
        )
        _walk(
            runs,
            _children(batch),
            lambda walking: [known[starts[at] + runs[at].accepted[-1]] for at in walking],
        )
        return runs

    def sample(walking: Sequence[int]) -> list[SampledToken]:
        rows = [
            sampling_at(sampled[at][1], [token.token_id for token in runs[at].tokens])
            for at in walking
        ]
        return sampler(logits[[starts[at] + runs[at].accepted[-1] for at in walking]], rows)

    _walk(runs, _children(batch), sample)
    return runs


def _walk(
    runs: Sequence[AcceptedRun],
    children: Sequence[Mapping[tuple[int, int], int]],
    sample: Callable[[Sequence[int]], list[SampledToken]],
) -> None:
    """Walk all runs to their ends at once.

    `sample(walking)` samples tokens at the last accepted nodes of the runs with these indices.
    """
    walking = list(range(len(runs)))
    while walking:
        for index, token in zip(walking, sample(walking), strict=True):
            run = runs[index]
            run.tokens.append(token)
            child = children[run.row].get((run.accepted[-1], token.token_id))
            if child is not None:
                run.accepted.append(child)
        walking = [
            index for index in walking if len(runs[index].accepted) > len(runs[index].tokens)
        ]


def _children(batch: ForwardBatch) -> list[dict[tuple[int, int], int]]:
    """Return per row a mapping of (node, token) to the first child with that token."""
    if not isinstance(batch.spec_info, SpecInfo):
        raise InternalError("a VERIFY batch needs its trees")
    tokens = batch.spec_info.token_ids.tolist()
    start = 0
    found = []
    for row, length in zip(batch.spec_info.rows, batch.query_lens, strict=True):
        known: dict[tuple[int, int], int] = {}
        for node in range(1, length):
            known.setdefault((row.parents[node], tokens[start + node]), node)
        found.append(known)
        start += length
    return found
