"""Of two prefill workers the one that has a prompt gets what begins like it."""

import asyncio
import random

import pytest

from tests.one_process.test_prefix_cache import ask, question
from tests.support.cluster.clusters import running_cluster
from tests.support.models.checkpoints import make_checkpoint

MAX_ROUNDS = 20
NUM_TURNS = 6  # of each conversation


async def test_the_next_turn_goes_to_the_worker_of_the_last_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Two conversations begin at once, one on each worker, and go on one after the other while both
    are idle: by load alone each of the turns would find its prompt half of the time. A worker
    reports four times a second, so the first rounds may be too early."""
    checkpoint, rng = make_checkpoint(tmp_path_factory.mktemp("routed"), "llama"), random.Random(3)
    flags = ("--page-size", "16", "--chunk-tokens", "64")
    async with running_cluster(checkpoint, prefill=2, worker_flags=flags) as running:
        for number in range(MAX_ROUNDS):
            prompts = [rng.choices(range(3, 256), k=320) for _ in range(2)]
            await asyncio.gather(
                *(
                    ask(running.client, question(f"{number}, {place}", prompt))
                    for place, prompt in enumerate(prompts)
                )
            )
            await asyncio.sleep(0.2 * number)
            turns = [
                await ask(running.client, question(f"{number} goes on", [*prompt, 7, 8]))
                for prompt in prompts * NUM_TURNS
            ]
            if all(turn.finish.usage.cached_tokens == 320 for turn in turns):
                break
        assert {turn.finish.usage.cached_tokens for turn in turns} == {320}
        await running.until_clean()
