"""A prefill worker of one stage whose forwards of more than one token never end: FOLDER_OF_MODEL
ANNOUNCE_FILE."""

import sys
import threading
from pathlib import Path

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.pipeline.stage_executor import StageExecutor
from pool.start import start
from prefill.worker import PrefillRole

run = StageExecutor.run


def hang(
    executor: StageExecutor, batch: ForwardBatch, incoming: StageOutput | None = None
) -> StageOutput:
    if batch.num_tokens > 1:  # the warm-up has one
        threading.Event().wait()
    return run(executor, batch, incoming)


StageExecutor.run = hang  # type: ignore[method-assign,assignment]
sys.exit(
    start(
        PrefillRole(),
        {
            "model": Path(sys.argv[1]),
            "announce": Path(sys.argv[2]),
            "step_limit_s": 2.0,
            "num_pages": 9,
            "drain_s": 60.0,
        },
        None,
        name="prefill",
    )
)
