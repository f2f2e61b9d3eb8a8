"""A model divided between ranks gives the bits of one process, whatever else it is divided into."""

import pytest
import torch

from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank
from engine.core.numerics import Numerics
from engine.core.request import DrawnToken, Request, SamplingParams
from engine.pipeline.ranks import StageRanks
from models.loader import read_model
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError
from tests.models.conftest import CheckpointMaker
from tests.support.models import tiny_models as models
from tests.support.models.tiny_models import tiny
from tests.support.pool.local_pool import local_pool

SPLITS = [  # stages, ranks; 4 ranks have 2 heads of keys and values
    (models.QWEN3, "bfloat16", 1, 4), (models.HYBRID, "float32", 2, 2), (models.HYBRID_MOE, "bfloat16", 1, 2),
    (models.GLM_DSA, "float32", 1, 4),
]


def answers(config: dict[str, object], dtype: str, num_stages: int, tp: int) -> list[list[DrawnToken]]:
    """To three prompts at once, in chunks, greedy and sampled."""
    generator = torch.Generator().manual_seed(3)
    requests = [Request(f"r{length}", tuple(torch.randint(3, 250, (length,), generator=generator).tolist()), 5,
                        SamplingParams(temperature=temperature, seed=length), num_top_logprobs=3)
                for length, temperature in ((5, 0.0), (150, 0.8), (33, 0.0))]
    with local_pool(tiny(config, dtype), num_stages, tp=tp) as pool:
        return [answer.tokens for answer in pool.generate(requests)]


@pytest.mark.parametrize(("config", "dtype", "num_stages", "tp"), SPLITS,
                         ids=[f"{each[0]['model_type']}-{each[2]}x{each[3]}" for each in SPLITS])
def test_ranks_and_stages_give_the_bits_of_one_process(config: dict[str, object], dtype: str, num_stages: int,
                                                       tp: int) -> None:
    assert answers(config, dtype, num_stages, tp) == answers(config, dtype, 1, 1)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm_moe_dsa"])
def test_every_rank_reads_every_byte_of_its_stage(checkpoint: CheckpointMaker, family: str) -> None:
    """So ranks, and pools of any widths, compare one digest."""
    model, totals = read_model(checkpoint(family)), set()
    for own in (ONLY_RANK, TensorRank(0, 2), TensorRank(1, 2)):
        digest = WeightsDigest()
        model.of_rank(own).load_stage(LayerRange(0, model.facts.num_layers), numerics=Numerics.EXACT, digest=digest,
                                      ranks=StageRanks(own) if own.size > 1 else None)
        totals.add(digest.total())
    assert len(totals) == 1


@pytest.mark.parametrize(("config", "size", "says"), [
    (models.HYBRID, 4, "--tp 4 does not divide the 2 key heads of GatedDeltaNet"),
    ({**models.QWEN3, "num_attention_heads": 6, "num_key_value_heads": 3}, 4, "does not divide the 6 heads"),
    ({**models.QWEN3, "intermediate_size": 100}, 2, "sums over 100 inner values of a feed-forward"),
    ({**models.QWEN3_MOE, "num_experts": 6}, 4, "does not divide the 6 experts"),
    (models.QWEN3, 3, "sums over 128 values of attention's heads"),
])
def test_what_ranks_cannot_divide_is_refused_by_name(config: dict[str, object], size: int, says: str) -> None:
    description = tiny(config)
    assert description.of_rank(ONLY_RANK) is description
    with pytest.raises(ConfigError, match=says) as refused:
        description.of_rank(TensorRank(0, size))
    assert refused.value.field == "tp"
