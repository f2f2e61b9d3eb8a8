"""Drawing with what the last stage keeps of requests: the counts that penalties need, and texts
under a grammar.

Rows bring what changed of their output (`OutputRow`), so a step costs what it changes, not what the
context is long. What is drawn is still a function of prompt, output and logits alone: what is kept
follows each row, also further back, because at a node of a draft tree the row is that of its path.

Tokens that a grammar does not allow have no probability. Masks are computed in the grammars' own
processes, from `prepare` on, while the forward runs on this thread; for a tree under verification
those of its nodes, too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.core.batch import ForwardBatch, ForwardMode, OutputRow, SamplingRow
from engine.core.draft_trees import SpecInfo
from engine.core.request import DrawnToken, ProblemCause
from engine.sampling.sampler import Mask, TokenCounts, sample
from runtime.errors import FieldViolation, InvalidRequestError, StalledError
from runtime.grammar import Grammars, GuidedText, MaskJob, unpacked

STEP_WAIT_S = 1.0  # for the masks of one step, behind its forward

Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens and parents of its nodes
_NO_TREE: Tree = (0,), (-1,)


@dataclass
class _Kept:
    """Of one request."""

    base: OutputRow  # of the step under way
    share: float = 1.0  # of what all texts of the step may compute
    counts: TokenCounts | None = None  # as soon as it draws, where penalties need them
    text: GuidedText | None = None
    job: MaskJob | None = None
    problem: str = ""
    cause: ProblemCause = ProblemCause.GRAMMAR

    def forget(self) -> None:
        if self.text is not None:
            self.text.close()


@dataclass(frozen=True)
class _Drawing:
    """How one row is drawn, or why it is not."""

    allowed: Mask | None = None
    counts: TokenCounts | None = None
    problem: str = ""
    cause: ProblemCause = ProblemCause.GRAMMAR


class GuidedSampler:
    """A `Sampler` for rows of every kind. Belongs to the engine thread of a last stage."""

    def __init__(self, grammars: Grammars | None) -> None:
        """Without `grammars` (a model without a tokenizer) rows must not bring any."""
        self._grammars = grammars
        self._kept: dict[int, _Kept] = {}
        self._vocab_size = 0  # as soon as there are logits
        self._deadline_s: float | None = None  # of the step under way, as soon as it draws

    def reset(self) -> None:
        """Another leader's requests will come: what is kept belongs to no one."""
        for kept in self._kept.values():
            kept.forget()
        self._kept.clear()

    def prepare(self, batch: ForwardBatch) -> None:
        """Before the forward of a batch: begin to compute what its drawing needs, as far as that
        needs no logits."""
        self._deadline_s = None
        for key in batch.ended_keys:
            if (ended := self._kept.pop(key, None)) is not None:
                ended.forget()
        trees = _trees(batch)
        drawing = [
            (row.output, tree)
            for row, tree in zip(batch.sampling, trees, strict=True)
            if row is not None and row.output is not None
        ]
        for output, tree in drawing:
            self._begin(output, tree, 1 / len(drawing))

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DrawnToken]:
        """As `sample`. A row whose grammar cannot be followed, or not quickly enough, gets a token
        with `problem` set. Rows that were not prepared are prepared here."""
        if all(row.output is None for row in rows):
            return sample(logits, rows)
        self._vocab_size = logits.shape[1]
        found = [
            self._find(row, row.output) if row.output is not None else _Drawing() for row in rows
        ]
        fine = [at for at, how in enumerate(found) if not how.problem]
        drawn = iter(
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
            DrawnToken(0, problem=how.problem, cause=how.cause) if how.problem else next(drawn)
            for how in found
        ]

    def _begin(self, output: OutputRow, tree: Tree, share: float) -> _Kept:
        """Take the row's request up, and request its masks. What is wrong is kept, for the row
        alone."""
        kept = self._kept.get(output.key)
        if output.opening is not None or kept is None:
            if kept is not None:
                kept.forget()
            kept = self._kept[output.key] = _Kept(output)
            self._open(kept, output)
        kept.base, kept.share, kept.job = output, share, None
        if kept.text is not None:
            try:
                kept.job = kept.text.ask(output.kept, output.token_ids, *tree, share=share)
            except InvalidRequestError as error:
                kept.problem = error.violations[0].description
        return kept

    def _open(self, kept: _Kept, output: OutputRow) -> None:
        opening = output.opening
        if opening is None:
            kept.problem, kept.cause = (
                "the last stage does not know this request's output",
                ProblemCause.DEFECT,
            )
        elif opening.grammar is not None and self._grammars is None:
            kept.problem, kept.cause = (
                "a row brings a grammar, but the model has no tokenizer",
                ProblemCause.DEFECT,
            )
        elif opening.grammar is not None and self._grammars is not None:
            kept.text = self._grammars.open(opening.grammar)

    def _find(self, row: SamplingRow, output: OutputRow) -> _Drawing:
        kept = self._kept.get(output.key)
        if kept is None or not _goes_on(kept.base, output):
            kept = self._begin(output, _NO_TREE, 1.0)
        if kept.problem:
            return _Drawing(problem=kept.problem, cause=kept.cause)
        counts = None
        if row.params.needs_history:
            try:
                counts = self._count(kept, output)
            except IndexError as error:
                return _Drawing(
                    problem=f"the last stage does not know this request's output: {error}",
                    cause=ProblemCause.DEFECT,
                )
        if kept.text is None:
            return _Drawing(counts=counts)
        try:
            return _Drawing(self._mask(kept, kept.text, output), counts)
        except InvalidRequestError as error:
            kept.problem = error.violations[0].description
        except StalledError as error:
            kept.problem, kept.cause = str(error), ProblemCause.BUSY
        return _Drawing(problem=kept.problem, cause=kept.cause)

    def _count(self, kept: _Kept, output: OutputRow) -> TokenCounts:
        """Raises IndexError when the row builds on an output that is not known."""
        if kept.counts is None:
            prompt = () if output.opening is None else output.opening.prompt_token_ids
            kept.counts = TokenCounts(prompt, self._vocab_size)
        kept.counts.move(output.kept, output.token_ids)
        return kept.counts

    def _mask(self, kept: _Kept, text: GuidedText, output: OutputRow) -> Mask:
        """[vocab] what may follow. A node that was not computed beside the forward is computed now.

        Raises:
            InvalidRequestError: its grammar does not allow the output, or cannot be followed
                quickly enough.
            StalledError: its process was not let compute in time, or has to compile first, for which
                no step waits.
        """
        if not text.is_ready:
            raise StalledError("a grammar's process is gone and has to be started again")
        job, path = kept.job, output.token_ids[len(kept.base.token_ids) :]
        if job is not None:
            self._wait(job, text)
        if job is None or path not in job.masks:
            job, path = text.ask(output.kept, output.token_ids, share=kept.share), ()
            self._wait(job, text)
        return unpacked(job.masks[path], self._vocab_size)

    def _wait(self, job: MaskJob, text: GuidedText) -> None:
        """Raises InvalidRequestError and StalledError."""
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + STEP_WAIT_S
        if not job.wait(self._deadline_s):
            text.give_up(job, f"{STEP_WAIT_S:g} s of a step")
        if job.problem and job.is_held_up:
            raise StalledError(job.problem)
        if job.problem:
            raise InvalidRequestError(FieldViolation("structured_output", job.problem))


def _goes_on(base: OutputRow, output: OutputRow) -> bool:
    """Whether a row is that of `base`, or of a node behind it."""
    return (base.kept, base.opening) == (
        output.kept,
        output.opening,
    ) and base.token_ids == output.token_ids[: len(base.token_ids)]


def _trees(batch: ForwardBatch) -> list[Tree]:
    """Per row the nodes under verification, the first of which is the row's last known token."""
    if batch.mode is not ForwardMode.VERIFY or not isinstance(batch.spec_info, SpecInfo):
        return [_NO_TREE] * batch.num_rows
    tokens, start, trees = batch.spec_info.token_ids.tolist(), 0, []
    for row, length in zip(batch.spec_info.rows, batch.query_lens, strict=True):
        trees.append((tuple(tokens[start : start + length]), row.parents))
        start += length
    return trees
