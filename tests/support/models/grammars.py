"""Masks of a grammar after a text, computed as the last stage does."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.grammar import Grammars, GuidedText, process, unpacked
from runtime.grammar.language import Grammar
from tests.support.models.guided import VOCAB_SIZE

LONG_S = 60.0  # nothing here is about time


def wait_long_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the timeout of masks for machines that stall. Tests of that limit set their own."""
    monkeypatch.setattr(process, "ANSWER_S", LONG_S)
    monkeypatch.setattr(process, "COMPILE_WALL_S", LONG_S)
    monkeypatch.setattr("engine.sampling.guided.STEP_WAIT_S", LONG_S)


def allowed_after(text: GuidedText, kept: int, token_ids: Sequence[int]) -> NDArray[np.bool_]:
    """Return the mask [VOCAB_SIZE]; fail with the problem if there is one."""
    job = text.ask(kept, token_ids)
    assert job.wait(time.monotonic() + LONG_S)
    assert job.problem == ""
    return unpacked(job.masks[()], VOCAB_SIZE)


def fresh_after(
    grammars: Grammars, grammar: Grammar, token_ids: Sequence[int]
) -> NDArray[np.bool_]:
    """Return the mask of a new matcher after this text."""
    text = grammars.open(grammar)
    try:
        return allowed_after(text, 0, token_ids)
    finally:
        text.close()
