"""S1-10: padding, rejected nodes and rows of an earlier batch may hold anything; nothing of it is
ever read."""

import pytest
import torch

from models.loader import ModelDescription
from testing.inprocess_channel import InProcessChannel
from tests.decode.test_speculation import assert_nothing_leaked, requests, shown
from tests.support.drafts.drafters import CHAINS, TREES, OracleDrafter, Shape, always
from tests.support.models.tiny_models import GLM_DSA, HYBRID, LLAMA, tiny
from tests.support.pool.local_pool import Answer, Speculation, local_pool

MODELS = {"llama": LLAMA, "hybrid": HYBRID, "DSA": GLM_DSA}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def drafting(plain: list[Answer], shape: Shape, *, poisons_leftovers: bool = True) -> Speculation:
    truth = {
        key: [*request.prompt_token_ids, *(token.token_id for token in answer.tokens)]
        for key, (request, answer) in enumerate(zip(requests(12), plain, strict=True), start=1)
    }
    drafter = OracleDrafter(shape, truth, error_rate=0.4)
    return Speculation(always(drafter), shape.nodes, poisons_leftovers=poisons_leftovers)


@pytest.fixture(scope="module", params=MODELS)
def description(request: pytest.FixtureRequest) -> ModelDescription:
    return tiny(MODELS[request.param])


@pytest.fixture(scope="module")
def plain(description: ModelDescription) -> list[Answer]:
    torch.set_num_threads(1)
    with local_pool(description) as pool:
        return pool.generate(requests(12))


@pytest.mark.parametrize(
    ("shape", "size"), [(CHAINS["chain 3"], 2), (TREES["tree 4x4/15"], 1)], ids=["chain", "tree"]
)
def test_s1_10_padding_and_rejected_nodes_may_be_nan(
    description: ModelDescription, plain: list[Answer], shape: Shape, size: int
) -> None:
    with local_pool(description, size, speculation=drafting(plain, shape)) as pool:
        assert shown(pool.generate(requests(12))) == shown(plain)
        assert_nothing_leaked(pool)


def test_s1_10_rows_of_an_earlier_batch_may_be_nan(
    description: ModelDescription, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage's input is in memory that the next frame overwrites; batches shrink as requests
    end."""
    receive, last = InProcessChannel.receive, dict[int, memoryview]()

    def overwriting(self: InProcessChannel, rank: int, *, timeout_s: float) -> memoryview | None:
        frame = receive(self, rank, timeout_s=timeout_s)
        if frame is None:
            return None
        if (before := last.get(id(self))) is not None:
            before[:] = b"\xff" * len(before)
        last[id(self)] = memoryview(bytearray(frame))
        return last[id(self)]

    monkeypatch.setattr(InProcessChannel, "receive", overwriting)
    with local_pool(description, 3, speculation=drafting(plain, TREES["tree 4x4/15"])) as pool:
        assert shown(pool.generate(requests(12))) == shown(plain)
    assert last
