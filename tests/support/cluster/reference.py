"""One tiny hybrid checkpoint on disk for all tests of clusters, and the output of a single
process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.numerics import WeightFormat
from engine.core.request import Request
from models.adapters import read_adapters
from models.loader import read_model
from tests.support.models.checkpoints import make_checkpoint
from tests.support.pool.local_pool import local_pool


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write Qwen3.5 text: four layers, fp32, no tokenizer; prompts are token ids."""
    return make_checkpoint(tmp_path_factory.mktemp("cluster"), "qwen3_5_text")


class Reference:
    """Output of one process without any handoff, one request at a time."""

    def __init__(
        self,
        path: Path,
        *,
        weight_format: WeightFormat = WeightFormat.MODEL,
        adapters: Path | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self._description = replace(
            read_model(path, weight_format=weight_format),
            adapters=() if adapters is None else read_adapters(adapters),
        )

    def answers(self, requests: list[Request]) -> list[list[tuple[int, float | None]]]:
        """Return (token id, logprob) per request; the page size is the clusters' default. Requests
        name their adapters as clients do."""
        keys = {adapter.name: adapter.key for adapter in self._description.adapters}
        requests = [
            replace(request, adapter=keys[request.adapter]) if request.adapter else request
            for request in requests
        ]
        with local_pool(
            self._description, page_size=64, num_pages=200, max_running=len(requests)
        ) as pool:
            return [
                [
                    (token.token_id, None if token.logprobs is None else token.logprobs.logprob)
                    for token in pool.generate([request])[0].tokens
                ]
                for request in requests
            ]


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)
