"""Of two prefill workers the one whose own tier has a prompt gets what begins like it."""

import asyncio
import random

from baton.cluster_config import demo_model
from tests.one_process.test_prefix_cache import ask, question
from tests.support.cluster.clusters import running_cluster

NUM_PROMPTS = 12
LENGTH = 320  # tokens; a pool has pages for three such prompts
FLAGS = ("--page-size", "16", "--num-pages", "70", "--host-cache-mb", "64")
MAX_ROUNDS = 5


async def test_a_prompt_goes_to_the_worker_whose_host_memory_has_it() -> None:
    """The prompts are asked one after the other while both workers are idle: by load alone each would
    find its host copy half of the time. Reports follow with a delay, so the first round may be too
    early. Computing takes many times as long as reading, so that a busy machine reads, too."""
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 256), k=LENGTH) for _ in range(NUM_PROMPTS)]
    async with running_cluster(demo_model(), prefill=2, worker_flags=FLAGS) as running:
        for number, prompt in enumerate(prompts):
            cold = await ask(running.client, question(f"cold {number}", prompt))
            assert cold.finish.usage.cached_tokens == 0
        for number in range(MAX_ROUNDS):
            await asyncio.sleep(0.3 * number)
            turns = [
                await ask(running.client, question(f"{number} goes on", [*prompt, 7, 8]))
                for prompt in prompts
            ]
            usages = [turn.finish.usage for turn in turns]
            if {usage.cached_tokens for usage in usages} == {LENGTH}:
                break
        assert {usage.cached_tokens for usage in usages} == {LENGTH}
        in_memory = sum(not usage.host_tokens for usage in usages)
        assert in_memory <= 6, "each worker has pages for three prompts"
        await running.until_clean()
