"""A batch that cannot run ends its own requests with any kind of error, and the next ones are
served."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from decode.entry import Finished
from engine.core.batch import SamplingRow
from engine.core.request import Request, SampledToken, SamplingParams
from engine.pipeline.results import StepFailed
from engine.sampling.guided import GuidedSampler
from tests.support.models.tiny_models import QWEN3, tiny
from tests.support.pool import local_pool as pools


def request(*prompt: int) -> Request:
    return Request("r", prompt, 2, SamplingParams(temperature=0))


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_token_that_the_first_stage_cannot_embed_ends_its_request_alone(
    size: int, tp: int
) -> None:
    with pools.local_pool(tiny(QWEN3), size, tp=tp) as pool:
        (answer,) = pool.generate([request(1, 2, tiny(QWEN3).facts.vocab_size)])
        assert answer.failed is not None
        assert isinstance(answer.failed.error, StepFailed)
        assert "stage 0: index out of range" in str(answer.failed.error)
        (answer,) = pool.generate([request(1, 2, 3)])
        assert isinstance(answer.finished, Finished)


@pytest.mark.parametrize(("size", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_failure_in_the_last_stage_ends_its_request_alone(
    size: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [KeyError("a bug")]

    class Sampler(GuidedSampler):
        def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
            if errors:
                raise errors.pop()
            return super().__call__(logits, rows)

    monkeypatch.setattr(pools, "GuidedSampler", Sampler)
    with pools.local_pool(tiny(QWEN3), size, tp=tp) as pool:
        (answer,) = pool.generate([request(1, 2, 3)])
        assert answer.failed is not None
        assert f"stage {size - 1}: 'a bug'" in str(answer.failed.error)
        (answer,) = pool.generate([request(1, 2, 3)])
        assert isinstance(answer.finished, Finished)
