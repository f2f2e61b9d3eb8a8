"""A model divided between ranks gives the bits of one process, with any other division."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.core.layer_range import ONLY_RANK, LayerRange, TensorRank
from engine.core.numerics import Numerics, WeightFormat
from engine.core.request import Request, SampledToken, SamplingParams
from engine.pipeline.ranks import StageRanks
from models.blocks import linear
from models.blocks.moe import MoeSpec, SoftmaxRouting
from models.blocks.random_weights import RandomWeights
from models.blocks.spec import FeedForward
from models.blocks.weights import Weights
from models.loader import ModelDescription, read_model
from models.weights_digest import WeightsDigest
from runtime.errors import ConfigError
from tests.engine.pipeline.test_data_ranks import NotingParts, ranks_of
from tests.engine.pipeline.test_ranks import together
from tests.models.conftest import CheckpointMaker
from tests.support.models import tiny_models as models
from tests.support.models.quantized import write_quantized
from tests.support.models.tiny_models import tiny
from tests.support.pool.local_pool import local_pool

SPLITS = [  # stages, ranks, data ranks; 4 ranks have 2 heads of keys and values
    (models.QWEN3, "bfloat16", 1, 4, 1),
    (models.HYBRID, "float32", 2, 2, 1),
    (models.HYBRID_MOE, "bfloat16", 1, 2, 1),
    (models.GLM_DSA, "float32", 1, 4, 1),
    (models.QWEN3, "bfloat16", 1, 4, 2),
    (models.HYBRID_MOE, "float32", 2, 2, 2),
    (models.GLM_DSA, "float32", 1, 2, 2),
    (models.QWEN3_NEXT, "float32", 1, 2, 1),
    (models.GEMMA4, "bfloat16", 2, 2, 1),
    (models.GEMMA3, "float32", 1, 2, 2),
    (models.KIMI_LINEAR, "bfloat16", 2, 2, 1),
    (models.LLAMA4, "bfloat16", 1, 4, 1),
    (models.MINIMAX_M2, "bfloat16", 1, 4, 2),
    (models.MINIMAX_M2, "float32", 2, 4, 1),
    (models.GPT_OSS, "bfloat16", 2, 2, 1),
    (models.GPT_OSS, "float32", 1, 4, 2),
    (models.LLAMA, "bfloat16", 1, 4, 1),
    (models.LLAMA, "float32", 1, 2, 1),
    ({**models.LLAMA, "num_attention_heads": 8}, "float32", 1, 8, 1),
]


THREE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
UNEVEN = [  # the same, with parts that differ or are no eighths of sums
    ({**models.LLAMA, **THREE_HEADS}, "bfloat16", 1, 2, 1),
    ({**models.LLAMA, **THREE_HEADS}, "float32", 1, 3, 1),
    ({**models.LLAMA, **THREE_HEADS, "intermediate_size": 18}, "bfloat16", 1, 6, 1),
    ({**models.QWEN3, **THREE_HEADS, "intermediate_size": 18}, "bfloat16", 2, 4, 2),
    (
        {**models.LLAMA, **THREE_HEADS, "attention_bias": True, "mlp_bias": True},
        "bfloat16",
        1,
        3,
        1,
    ),
    ({**models.QWEN3, "num_attention_heads": 4, "head_dim": 10}, "float32", 1, 4, 1),
    (
        {**models.HYBRID_MOE, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
        "bfloat16",
        2,
        2,
        1,
    ),
    (
        {**models.QWEN3_NEXT, "linear_num_key_heads": 3, "linear_num_value_heads": 6},
        "float32",
        1,
        2,
        1,
    ),
    ({**models.GLM_DSA, "num_attention_heads": 5}, "bfloat16", 1, 3, 1),
    ({**models.GLM_DSA, "num_attention_heads": 5}, "float32", 1, 6, 2),
    (
        {**models.GEMMA4, "num_global_key_value_heads": 3, "num_attention_heads": 12},
        "float32",
        1,
        2,
        1,
    ),
    ({**models.KIMI_LINEAR, "linear_num_heads": 6}, "bfloat16", 1, 4, 1),
    ({**models.GPT_OSS, **THREE_HEADS, "num_local_experts": 7}, "bfloat16", 1, 3, 1),
    ({**models.MINIMAX_M2, **THREE_HEADS}, "bfloat16", 1, 2, 1),
    ({**models.QWEN3_MOE, "num_experts": 6}, "bfloat16", 2, 4, 1),
]


@pytest.fixture(autouse=True)
def long_batches_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limit so that sums of the longest prompt are distributed and those of decode steps
    are added on every rank."""
    monkeypatch.setattr(linear, "SHARED_OUT_BYTES", 8 << 10)


def answers(
    description: ModelDescription, num_stages: int, tp: int, dp: int = 1
) -> list[list[SampledToken]]:
    """Return the output for three prompts at once, in chunks, greedy and sampled."""
    generator = torch.Generator().manual_seed(3)
    requests = [
        Request(
            f"r{length}",
            tuple(torch.randint(3, 250, (length,), generator=generator).tolist()),
            5,
            SamplingParams(temperature=temperature, seed=length),
            num_top_logprobs=3,
        )
        for length, temperature in ((5, 0.0), (150, 0.8), (33, 0.0))
    ]
    with local_pool(description, num_stages, tp=tp, dp=dp) as pool:
        return [answer.tokens for answer in pool.generate(requests)]


@pytest.mark.parametrize(
    ("config", "dtype", "num_stages", "tp", "dp"),
    [*SPLITS, *UNEVEN],
    ids=[
        f"{kind}{each[0]['model_type']}-{each[2]}x{each[3]}-data{each[4]}"
        for kind, splits in (("", SPLITS), ("uneven-", UNEVEN))
        for each in splits
    ],
)
def test_ranks_and_stages_give_the_bits_of_one_process(
    config: dict[str, object], dtype: str, num_stages: int, tp: int, dp: int
) -> None:
    description = tiny(config, dtype)
    assert answers(description, num_stages, tp, dp) == answers(description, 1, 1)


@pytest.mark.parametrize(
    ("config", "weight_format", "num_stages", "tp", "dp"),
    [
        (models.HYBRID_MOE, WeightFormat.INT8, 2, 2, 1),
        (models.HYBRID_MOE, WeightFormat.INT4, 2, 2, 1),
        (models.GLM_DSA, WeightFormat.INT8, 1, 4, 2),
        (models.GLM_DSA, WeightFormat.INT4, 1, 4, 2),
        (models.QWEN3_NEXT, WeightFormat.INT8, 1, 2, 1),
        (models.KIMI_LINEAR, WeightFormat.INT8, 1, 2, 2),
        (models.KIMI_LINEAR, WeightFormat.INT4, 2, 2, 1),
        (models.GPT_OSS, WeightFormat.INT8, 2, 2, 1),
        ({**models.LLAMA, **THREE_HEADS}, WeightFormat.INT8, 1, 3, 1),
        ({**models.LLAMA, **THREE_HEADS}, WeightFormat.INT4, 1, 2, 1),
    ],
)
def test_so_do_coded_weights(
    config: dict[str, object], weight_format: WeightFormat, num_stages: int, tp: int, dp: int
) -> None:
    whole = tiny(config, "bfloat16")
    description = replace(whole, weight_format=weight_format)
    found = answers(description, num_stages, tp, dp)
    assert found == answers(description, 1, 1)
    assert found != answers(whole, 1, 1), "logprobs are not those of whole weights"


@pytest.mark.parametrize(
    ("family", "layout", "dtype", "weight_format"),
    [
        ("deepseek_v32", "fp8 blocks", torch.float32, WeightFormat.MODEL),
        ("llama", "gptq reordered", torch.float32, WeightFormat.MODEL),
        ("llama", "gptq reordered", torch.float32, WeightFormat.INT4),
        ("qwen3_5_text", "int8 channels", torch.bfloat16, WeightFormat.INT8),
    ],
)
def test_so_do_ranks_of_quantized_weights(
    checkpoint: CheckpointMaker,
    tmp_path: Path,
    family: str,
    layout: str,
    dtype: torch.dtype,
    weight_format: WeightFormat,
) -> None:
    """Blocks and groups of columns that go across the ranks' parts of a weight, and scales that
    eight bits keep."""
    folder = write_quantized(checkpoint(family, dtype=dtype), tmp_path / "model", layout)
    description = read_model(folder, weight_format=weight_format)
    assert answers(description, 1, 2) == answers(description, 1, 1)


@pytest.mark.parametrize(("num_tokens", "are_alike"), [(1, False), (150, False), (150, True)])
def test_results_of_experts_go_to_the_homes_of_their_tokens(
    num_tokens: int, *, are_alike: bool
) -> None:
    """Results of few tokens go to all ranks. Equal tokens choose the same experts: some ranks have
    no results."""
    spec = MoeSpec(
        hidden_size=64,
        num_experts=7,
        num_chosen=2,
        expert_width=32,
        routing=SoftmaxRouting(renormalize=True),
    )
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x[:1].expand(x.shape).contiguous() if are_alike else x

    def built(own: TensorRank, ranks: StageRanks | None) -> FeedForward:
        source = RandomWeights(seed=5)
        return spec.of_rank(own).build(
            Weights(
                source,
                prefix="",
                dtype=torch.bfloat16,
                numerics=Numerics.EXACT,
                parts=source,
                ranks=ranks,
            )
        )

    whole, sent = built(ONLY_RANK, None).forward(x), list[int]()

    def step(ranks: StageRanks) -> bool:
        noting = NotingParts(ranks)
        with ranks.step(1):
            out = built(ranks.own, ranks).forward(x)
        sent.append(noting.num_bytes)
        return torch.equal(out, whole)

    assert together(ranks_of(4, 1), [step] * 4) == [True] * 4
    num_bytes, row_bytes = sum(sent), 64 * 2
    if num_tokens == 1:
        assert num_bytes == 3 * spec.num_chosen * row_bytes
    else:
        assert num_bytes <= (spec.num_chosen + 3) * num_tokens * row_bytes, (
            "each result once, each sum to three"
        )


@pytest.mark.parametrize(
    "family", ["qwen3_5_moe_text", "qwen3_next", "glm_moe_dsa", "kimi_linear", "llama4", "gpt_oss"]
)
def test_every_rank_reads_every_byte_of_its_stage(checkpoint: CheckpointMaker, family: str) -> None:
    """So ranks, and pools of any widths, compare one digest."""
    model, totals = read_model(checkpoint(family)), set()
    for own in (ONLY_RANK, TensorRank(0, 2), TensorRank(1, 2)):
        digest = WeightsDigest()
        model.of_rank(own).load_stage(
            LayerRange(0, model.facts.num_layers),
            numerics=Numerics.EXACT,
            digest=digest,
            ranks=StageRanks(own) if own.size > 1 else None,
        )
        totals.add(digest.total())
    assert len(totals) == 1


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        (
            models.HYBRID,
            4,
            r"--tp 4 leaves a rank without any of the 2 key heads of GatedDeltaNet "
            r"\(linear_num_key_heads\)",
        ),
        (
            {**models.QWEN3, "num_attention_heads": 3, "num_key_value_heads": 1},
            4,
            r"without any of the 3 heads of attention \(num_attention_heads\)",
        ),
        (
            {**models.QWEN3, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            r"--tp 4 is more than the 3 heads of keys and values \(num_key_value_heads\), and no "
            r"multiple of them",
        ),
        (
            {**models.GLM_DSA, "num_attention_heads": 2},
            4,
            r"2 heads of latent attention \(num_attention_heads\)",
        ),
        (
            {**models.QWEN3, "intermediate_size": 3},
            4,
            r"--tp 4 leaves a rank without any of the 3 inner values of a feed-forward "
            r"\(intermediate_size\)",
        ),
        (
            {**models.LLAMA4, "intermediate_size_mlp": 3},
            4,
            r"3 inner values of a feed-forward \(intermediate_size_mlp\)",
        ),
        (
            {**models.HYBRID_MOE, "linear_num_key_heads": 4, "shared_expert_intermediate_size": 3},
            4,
            r"3 inner values of a feed-forward \(shared_expert_intermediate_size\)",
        ),
        (
            {**models.QWEN3_MOE, "num_experts": 3},
            4,
            r"--tp 4 leaves a rank without any of the 3 experts \(num_experts\)",
        ),
        (
            {**models.GLM_DSA, "n_routed_experts": 3},
            4,
            r"any of the 3 experts \(n_routed_experts\)",
        ),
        (
            {**models.QWEN3, "vocab_size": 3},
            4,
            r"any of the 3 tokens of the vocabulary \(vocab_size\)",
        ),
        (
            {**models.GEMMA4, "num_global_key_value_heads": 3, "num_attention_heads": 12},
            4,
            r"3 heads of keys and values \(num_global_key_value_heads\)",
        ),
        (
            {**models.KIMI_LINEAR, "linear_num_heads": 6},
            8,
            r"6 key heads of GatedDeltaNet \(num_heads of linear_attn_config\)",
        ),
    ],
)
def test_sizes_that_leave_ranks_without_work_are_refused_by_name(
    config: dict[str, object], size: int, says: str
) -> None:
    description = tiny(config)
    assert description.of_rank(ONLY_RANK) is description
    with pytest.raises(ConfigError, match=says) as refused:
        description.of_rank(TensorRank(0, size))
    assert refused.value.field == "tp"
