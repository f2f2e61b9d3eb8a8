"""Models of random sizes, divided at random between stages, ranks and data ranks, give the bits of
one process."""

import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest

from engine.core.layer_range import TensorRank
from engine.core.numerics import WeightFormat
from engine.core.request import Request, SamplingParams
from models.blocks import linear
from models.loader import ModelDescription
from runtime.errors import ConfigError
from tests.support.grids import mostly_long
from tests.support.models import tiny_models as models
from tests.support.models.tiny_models import tiny
from tests.support.pool.local_pool import SUFFIXES, local_pool

FAMILIES: list[dict[str, object]] = [
    models.HYBRID,
    models.LLAMA,
    models.GEMMA3,
    models.GEMMA4,
    models.LLAMA4,
    models.QWEN3,
    models.GLM_DSA,
    models.DEEPSEEK_V3,
    models.QWEN3_MOE,
    models.GPT_OSS,
    models.MINIMAX_M2,
    models.GLM4_MOE,
    models.HYBRID_MOE,
    models.QWEN3_NEXT,
    models.KIMI_LINEAR,
]
# Sizes of a config, and the values that it may have where it has the field.
SIZES: Mapping[str, tuple[int, ...]] = {
    "num_global_key_value_heads": (1, 2),
    "linear_num_key_heads": (2, 3, 4),
    "linear_num_value_heads": (12,),
    "linear_num_heads": (3, 4, 5, 6),
    "num_experts": (3, 4, 5, 6, 7, 9),
    "num_local_experts": (3, 4, 5, 6, 7, 9),
    "n_routed_experts": (4, 6, 8, 10),
    "intermediate_size": (20, 44, 64, 100),
    "moe_intermediate_size": (20, 44, 64, 100),
    "intermediate_size_mlp": (20, 44, 64, 100),
    "shared_expert_intermediate_size": (20, 44, 64, 100),
    "vocab_size": (257, 260, 264),
}


def drawn(dice: random.Random) -> tuple[ModelDescription, int, int]:
    """Return a model, and numbers of ranks and of data ranks that can divide it."""
    while True:
        config = dict(dice.choice(FAMILIES))
        config |= {name: dice.choice(sizes) for name, sizes in SIZES.items() if name in config}
        kv_heads = dice.choice((1, 2, 3, 4, 6))
        config["num_attention_heads"] = 2 * kv_heads
        # Latent attention has as many heads of keys as of queries.
        config["num_key_value_heads"] = kv_heads * (1 + ("kv_lora_rank" in config))
        dtype = dice.choice(("bfloat16", "float32"))
        weight_format = dice.choice(tuple(WeightFormat)) if dtype == "bfloat16" else None
        tp = dice.choice((2, 3, 4, 5, 6, 8))
        dp = dice.choice([dp for dp in (1, 2, 4) if tp % dp == 0])
        with suppress(ConfigError):
            model = tiny(config, dtype)
            model = replace(model, weight_format=weight_format or WeightFormat.MODEL)
            for rank in range(tp):
                model.of_rank(TensorRank(rank, tp, dp))
            return model, tp, dp


def requests(dice: random.Random) -> list[Request]:
    """Return prompts of a token to some pages, greedy and sampled, of which some repeat."""
    found = []
    for number in range(4):
        length = dice.choice((1, 17, 40, 90, 220))
        motif = dice.choices(range(3, 250), k=dice.choice((5, length)))
        prompt = tuple(motif[place % len(motif)] for place in range(length))
        params = SamplingParams(temperature=dice.choice((0.0, 0.8)), seed=number)
        found.append(Request(f"{number}", prompt, dice.randint(1, 9), params, num_top_logprobs=2))
    return found


@pytest.mark.parametrize("seed", mostly_long(range(24), kept=(0, 4, 19, 20)))
def test_any_division_gives_the_bits_of_one_process(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(linear, "SHARED_OUT_BYTES", dice.choice((1, 4 << 10, 64 << 10)))
    description, tp, dp = drawn(dice)
    questions, num_stages = requests(dice), dice.randint(1, 3)
    speculation = dice.choice((None, SUFFIXES))
    with local_pool(description, num_stages, tp=tp, dp=dp, speculation=speculation) as pool:
        divided = [answer.tokens for answer in pool.generate(questions)]
    with local_pool(description) as pool:
        assert divided == [answer.tokens for answer in pool.generate(questions)]
