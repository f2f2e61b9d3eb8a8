"""A worker that takes two requests for one another: neither gets the other's response."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from runtime.errors import InternalError
from tests.support.cluster.in_the_middle import (
    Attack,
    RouterInput,
    WorkerEvent,
    attacked_cluster,
    outcome,
)

MessageT = TypeVar("MessageT", RouterInput, WorkerEvent)


class MixUp(Attack):
    """Swaps two requests: each gets what the worker has for the other."""

    def __init__(self) -> None:
        self._opened: list[RouterInput] = []

    def input(self, message: RouterInput) -> Iterable[RouterInput]:
        if len(self._opened) < 2 and message.HasField("open"):
            self._opened.append(message)  # the first one waits for the other
            return self._opened if len(self._opened) == 2 else ()
        return (self._swapped(message),)

    def event(self, message: WorkerEvent) -> Iterable[WorkerEvent]:
        return (self._swapped(message),)

    def _swapped(self, message: MessageT) -> MessageT:
        keys = [opened.key for opened in self._opened]
        if len(keys) == 2 and message.key in keys:
            message.key = sum(keys) - message.key
        return message


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_neither_request_gets_the_others_state(role: str, tmp_path: Path) -> None:
    """The prompts have the same length, so that only their content tells them apart."""
    async with attacked_cluster(tmp_path, role) as attacked:
        first = attacked.question
        other = replace(first, prompt_token_ids=tuple(reversed(first.prompt_token_ids)))
        right = {}
        for question in (first, other):
            right[question.prompt_token_ids], _ = await outcome(attacked.client, question, 60)
        assert right[first.prompt_token_ids] == attacked.right
        for number in range(8):
            await attacked.forget()
            attacked.worker.attack = MixUp()
            questions = [
                replace(question, request_id=f"{number}{name}")
                for name, question in (("first", first), ("other", other))
            ]
            got = await asyncio.gather(
                *(outcome(attacked.client, question, 60) for question in questions)
            )
            for question, (tokens, error) in zip(questions, got, strict=True):
                if error is None:
                    assert tokens == right[question.prompt_token_ids]
                else:  # the other's first token came before the terms were seen to be wrong
                    assert isinstance(error, InternalError), error
                    assert len(tokens) == 1
