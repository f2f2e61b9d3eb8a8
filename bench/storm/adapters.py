"""Adapters of a storm. One of them gets another version now and then, as an operator does it."""

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from baton.adapters import change_adapters
from baton.values import Query
from bench.storm import truth
from bench.storm.verdict import Truth
from runtime.errors import BatonError, ConfigError
from runtime.model_files.adapter_folders import WEIGHTS, adapter_folders
from runtime.security.access import ChannelSecurity

CHANGE_S = 30.0  # to load a version on all workers, some of which may be away
PAUSE_S = 0.5  # before an operator tries again


class StormAdapters:
    """The adapters that the workers of a storm read from `folder`; copies of those in `source`.

    The first one has two versions: its own weights, and those of the last one.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        """Copy the adapters, or raise ConfigError if there are fewer than two."""
        self.names = tuple(each.name for each in adapter_folders(source))
        if len(self.names) < 2:
            raise ConfigError(f"{source} has fewer than two adapters", field="adapters")
        self.folder = folder
        self._other = folder.with_name(f"{folder.name}-other")  # with the other version
        for copy in (self.folder, self._other):
            shutil.copytree(source, copy)
        first, last = (source / name / WEIGHTS for name in (self.names[0], self.names[-1]))
        self._changing = self.names[0]
        self._next = itertools.cycle((last, first))
        self._place(last, self._other)

    async def truths(
        self, model: Path, questions: Sequence[Query], arithmetic: tuple[str, ...]
    ) -> list[Truth]:
        """Return the right responses of each question: one for each version of its adapter."""
        right = await truth.truths(model, questions, arithmetic=arithmetic, adapters=self.folder)
        changing = [
            place
            for place, question in enumerate(questions)
            if question.model == f":{self._changing}"
        ]
        others = await truth.truths(
            model,
            [questions[place] for place in changing],
            arithmetic=arithmetic,
            adapters=self._other,
        )
        for place, other in zip(changing, others, strict=True):
            right[place] = [*right[place], *other]
        return right

    async def change(self, routers: Sequence[str], security: ChannelSecurity) -> None:
        """Give the first adapter its other version; ask in turn until all workers have it."""
        self._place(next(self._next), self.folder)
        with suppress(TimeoutError):
            async with asyncio.timeout(CHANGE_S):
                for router in itertools.cycle(routers):
                    with suppress(BatonError):
                        workers = await change_adapters(router, security, load=self._changing)
                        if workers and not any(worker.error for worker in workers):
                            return
                    await asyncio.sleep(PAUSE_S)

    def _place(self, version: Path, folder: Path) -> None:
        """Move the weights of a version into place in one step."""
        new = folder / f"{self._changing}.new"
        shutil.copyfile(version, new)
        new.replace(folder / self._changing / WEIGHTS)
