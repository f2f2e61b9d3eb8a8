"""A single stage that prepares its next step while one computes.

    engine thread   schedule, plan N+1 ──────────────▶ publish N, schedule, plan N+2 ──▶ …
    steps' thread   compute N, sample ─▶ put N's tokens into N+1, compute, sample ──────▶ …

Rows of N+1 that need a token of N have `NOT_SAMPLED` in its place. Everything else in the batch is as
if it had been built after N: positions, pages, the plan and its mark. So the results have the same
bits.
"""

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress

import torch

from engine.core.batch import ForwardBatch
from engine.core.rows import NOT_SAMPLED
from engine.pipeline.results import StepResult, StepResults
from engine.pipeline.stage_executor import StageExecutor
from engine.pipeline.stages import Pipeline
from engine.pipeline.step_plan import RankBatches

STEPS_THREAD = "engine steps"


class AheadStage:
    """A `Pipeline` that computes on its own thread.

    The engine thread owns it; only `wake` may be called by others. `close` ends the thread.
    """

    depth = 2
    runs_apart = True

    def __init__(self, stage: Pipeline, executor: StageExecutor) -> None:
        """Start the steps' thread, which owns `stage` from here on.

        `stage` has one process, and `executor` runs its whole model.
        """
        self._stage = stage
        self._executor = executor
        self._launched: queue.SimpleQueue[ForwardBatch | None] = queue.SimpleQueue()
        # None means that `wake` was called.
        self._ended: queue.SimpleQueue[StepResult | Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=STEPS_THREAD, daemon=True)
        self._thread.start()

    def launch(self, step: RankBatches) -> None:
        """Plan the step while the previous one may compute, and queue it."""
        (batch,) = step
        if batch is None:
            raise ValueError("a step of the only data rank has a batch")
        # Without a mark `run` plans again, and an error there is the step's error.
        with suppress(Exception):
            self._executor.plan_ahead(batch)
        self._launched.put(batch)

    def collect(self, timeout_s: float) -> StepResults | None:
        """Implement `Pipeline.collect`.

        It raises the error that broke the stage. No result follows it.
        """
        try:
            ended = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(ended, Exception):
            raise ended
        return None if ended is None else (ended,)

    def wake(self) -> None:
        self._ended.put(None)

    def close(self, timeout_s: float = 10) -> None:
        """End the thread after the queued steps. A thread that hangs is left alone."""
        self._launched.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        sampled: Mapping[int, int] = {}
        while (batch := self._launched.get()) is not None:
            try:
                put_sampled(batch, sampled)
                self._stage.launch((batch,))
                results = self._stage.collect(0)
                assert results is not None, "a stage of one process has its result at once"
                (result,) = results
                assert result is not None
                sampled = sampled_tokens(batch, result)
            except Exception as error:  # noqa: BLE001 - `collect` raises it in the engine thread
                self._ended.put(error)
                return
            self._ended.put(result)


def put_sampled(batch: ForwardBatch, sampled: Mapping[int, int]) -> None:
    """Replace `NOT_SAMPLED` by the tokens that the previous step sampled, by request.

    A request without such a token has failed in that step. Its row computes token 0, and its
    results are dropped.
    """
    if batch.token_ids is None or not (batch.token_ids == NOT_SAMPLED).any():
        return
    keys = [
        key
        for key, length in zip(batch.request_keys, batch.query_lens, strict=True)
        for _ in range(length)
    ]
    batch.token_ids.copy_(
        torch.tensor(
            [
                sampled.get(key, 0) if token == NOT_SAMPLED else token
                for key, token in zip(keys, batch.token_ids.tolist(), strict=True)
            ],
            dtype=torch.int64,
        )
    )


def sampled_tokens(batch: ForwardBatch, result: StepResult) -> Mapping[int, int]:
    """Return the sampled tokens by request, empty if the step failed."""
    if result.error is not None:
        return {}
    keys = [
        key for key, row in zip(batch.request_keys, batch.sampling, strict=True) if row is not None
    ]
    return {key: token.token_id for key, token in zip(keys, result.tokens, strict=True)}
