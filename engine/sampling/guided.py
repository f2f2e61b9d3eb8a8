"""Sampling with state of requests: token counts for penalties, and grammars.

Rows carry the changes of their output (`OutputRow`), so the cost of a step depends on the change,
not on the context length. A sampled token still depends only on prompt, output and logits. The
state follows each row, also backwards: at a node of a draft tree, the row describes the path to
that node.

Tokens that a grammar forbids have probability 0. The grammar processes compute masks from `prepare`
on, while this thread runs the forward. For a tree under verification they also compute the masks of
its nodes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, OutputRow, SamplingRow
from engine.core.draft_trees import SpecInfo
from engine.core.request import ProblemCause, SampledToken
from engine.sampling.sampler import Mask, TokenCounts, sample
from runtime.errors import FieldViolation, InvalidRequestError, StalledError
from runtime.grammar import Grammars, GuidedText, MaskJob, unpacked

MAX_FORCED = 32  # tokens that a grammar forces and that are looked up in one step
STEP_WAIT_S = 1.0  # limit for the masks of one step, counted from the end of its forward

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and parents of the nodes
_NO_TREE: Tree = (0,), (-1,)


@dataclass
class _Kept:
    """The state of one request."""

    base: OutputRow  # row of the current step
    share: float = 1.0  # share of the computing time that all grammars of the step have
    counts: TokenCounts | None = None  # set when the request first samples, if penalties need it
    text: GuidedText | None = None
    job: MaskJob | None = None
    problem: str = ""
    cause: ProblemCause = ProblemCause.GRAMMAR

    def forget(self) -> None:
        if self.text is not None:
            self.text.close()


@dataclass(frozen=True)
class _RowConstraints:
    """The mask and counts to sample one row with, or the reason why it cannot be sampled."""

    allowed: Mask | None = None
    counts: TokenCounts | None = None
    problem: str = ""
    cause: ProblemCause = ProblemCause.GRAMMAR


class GuidedSampler:
    """A `Sampler` for rows of every kind.

    The engine thread of a last stage owns it.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        """Create a sampler without state.

        Without `grammars` (the model has no tokenizer), no row may carry a grammar.
        """
        self._grammars = grammars
        self._kept: dict[int, _Kept] = {}
        self._vocab_size = 0  # known from the first logits on
        self._deadline_s: float | None = None  # of the current step, set when it begins to sample

    def reset(self) -> None:
        """Drop the state of all requests, before another leader sends its own."""
        for kept in self._kept.values():
            kept.forget()
        self._kept.clear()

    def prepare(self, batch: ForwardBatch) -> None:
        """Start the work for sampling that does not need the logits, before the forward."""
        self._deadline_s = None
        for key in batch.ended_keys:
            if (ended := self._kept.pop(key, None)) is not None:
                ended.forget()
        trees = _trees(batch)
        sampled = [
            (row.output, tree, num_drafted)
            for row, tree, num_drafted in zip(
                batch.sampling, trees, _num_drafted(batch), strict=True
            )
            if row is not None and row.output is not None
        ]
        for output, tree, num_drafted in sampled:
            # The first of the forced tokens is sampled in this step.
            num_forced = min(num_drafted + 1, MAX_FORCED) if num_drafted else 0
            self._begin(output, tree, 1 / len(sampled), num_forced)

    def forced(self, row: SamplingRow, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Implement `RequestSampler.forced`."""
        kept = None if row.output is None else self._kept.get(row.output.key)
        if kept is None or kept.job is None or not token_ids:
            return ()
        first, *rest = kept.job.forced.get(tuple(token_ids[:-1]), (-1,))
        return tuple(rest) if first == token_ids[-1] else ()

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """Sample one token per row, as `sample` does.

        A row gets a token with `problem` set if its grammar cannot be followed, or not in time.
        Rows that were not prepared are prepared here.
        """
        if all(row.output is None for row in rows):
            return sample(logits, rows)
        self._vocab_size = logits.shape[1]
        found = [
            self._find(row, row.output) if row.output is not None else _RowConstraints()
            for row in rows
        ]
        fine = [at for at, how in enumerate(found) if not how.problem]
        tokens = iter(
            sample(
                logits if len(fine) == len(rows) else logits[fine],
                [rows[at] for at in fine],
                [found[at].allowed for at in fine],
                [found[at].counts for at in fine],
            )
        )
        for row in rows:
            if (
                row.output is not None
                and row.output.is_only
                and (only := self._kept.pop(row.output.key, None))
            ):
                only.forget()
        return [
            SampledToken(0, problem=how.problem, cause=how.cause) if how.problem else next(tokens)
            for how in found
        ]

    def _begin(self, output: OutputRow, tree: Tree, share: float, num_forced: int = 0) -> _Kept:
        """Begin or continue the row's request, and request its masks.

        An error is stored for this row only.
        """
        kept = self._kept.get(output.key)
        if output.opening is not None or kept is None:
            if kept is not None:
                kept.forget()
            kept = self._kept[output.key] = _Kept(output)
            self._open(kept, output)
        kept.base = output
        kept.share = share
        kept.job = None
        if kept.text is not None:
            try:
                kept.job = kept.text.ask(
                    output.kept, output.token_ids, *tree, share=share, num_forced=num_forced
                )
            except InvalidRequestError as error:
                kept.problem = error.violations[0].description
        return kept

    def _open(self, kept: _Kept, output: OutputRow) -> None:
        opening = output.opening
        if opening is None:
            kept.problem = "the last stage does not know the output of this request"
            kept.cause = ProblemCause.DEFECT
        elif opening.grammar is not None and self._grammars is None:
            kept.problem = "a row carries a grammar, but the model has no tokenizer"
            kept.cause = ProblemCause.DEFECT
        elif opening.grammar is not None and self._grammars is not None:
            kept.text = self._grammars.open(opening.grammar)

    def _find(self, row: SamplingRow, output: OutputRow) -> _RowConstraints:
        kept = self._kept.get(output.key)
        if kept is None or not _goes_on(kept.base, output):
            kept = self._begin(output, _NO_TREE, 1.0)
        if kept.problem:
            return _RowConstraints(problem=kept.problem, cause=kept.cause)
        counts = None
        if row.params.needs_history:
            try:
                counts = self._count(kept, output)
            except IndexError as error:
                return _RowConstraints(
                    problem=f"the last stage does not know the output of this request: {error}",
                    cause=ProblemCause.DEFECT,
                )
        if kept.text is None:
            return _RowConstraints(counts=counts)
        try:
            return _RowConstraints(self._mask(kept, kept.text, output), counts)
        except InvalidRequestError as error:
            kept.problem = error.violations[0].description
        except StalledError as error:
            kept.problem = str(error)
            kept.cause = ProblemCause.BUSY
        return _RowConstraints(problem=kept.problem, cause=kept.cause)

    def _count(self, kept: _Kept, output: OutputRow) -> TokenCounts:
        """Return the request's token counts after this row.

        Raises:
            IndexError: the row builds on an unknown output.
        """
        if kept.counts is None:
            prompt = () if output.opening is None else output.opening.prompt_token_ids
            kept.counts = TokenCounts(prompt, self._vocab_size)
        kept.counts.move(output.kept, output.token_ids)
        return kept.counts

    def _mask(self, kept: _Kept, text: GuidedText, output: OutputRow) -> Mask:
        """Return the mask of allowed next tokens, [vocab] bool.

        If no job has computed the node, it is computed now.

        Raises:
            InvalidRequestError: the grammar does not allow the output, or is too slow.
            StalledError: the grammar's process had no time to compute, or it must compile first. No
                step waits for that.
        """
        if not text.is_ready:
            raise StalledError("the process of a grammar has ended and must be restarted")
        job = kept.job
        path = output.token_ids[len(kept.base.token_ids) :]
        if job is not None:
            self._wait(job, text)
        if job is None or path not in job.masks:
            job = text.ask(output.kept, output.token_ids, share=kept.share)
            path = ()
            self._wait(job, text)
        return unpacked(job.masks[path], self._vocab_size)

    def _wait(self, job: MaskJob, text: GuidedText) -> None:
        """Wait for the job until the step's deadline.

        Raises:
            InvalidRequestError: the job failed because of its grammar.
            StalledError: the job did not get enough computing time.
        """
        if self._deadline_s is None:
            # A float rather than a Deadline, as every step has one.
            self._deadline_s = time.monotonic() + STEP_WAIT_S
        if not job.wait(self._deadline_s):
            text.give_up(job, f"{STEP_WAIT_S:g} s of a step")
        if job.problem and job.is_stalled:
            raise StalledError(job.problem)
        if job.problem:
            raise InvalidRequestError(FieldViolation("structured_output", job.problem))


def _goes_on(base: OutputRow, output: OutputRow) -> bool:
    """Return whether `output` belongs to the row `base` or to a node after it."""
    return (base.kept, base.opening) == (
        output.kept,
        output.opening,
    ) and base.token_ids == output.token_ids[: len(base.token_ids)]


def _trees(batch: ForwardBatch) -> list[Tree]:
    """Return the tokens and parents of the nodes under verification, per row.

    The first node is the last known token of its row.
    """
    if batch.mode is not ForwardMode.VERIFY or not isinstance(batch.spec_info, SpecInfo):
        return [_NO_TREE] * batch.num_rows
    tokens = batch.spec_info.token_ids.tolist()
    start = 0
    trees = []
    for row, length in zip(batch.spec_info.rows, batch.query_lens, strict=True):
        trees.append((tuple(tokens[start : start + length]), row.parents))
        start += length
    return trees


def _num_drafted(batch: ForwardBatch) -> list[int]:
    """Return the largest number of nodes of each row's next tree."""
    if not isinstance(batch.spec_info, SpecInfo):
        return [0] * batch.num_rows
    return [row.num_draft_tokens or 0 for row in batch.spec_info.rows]
