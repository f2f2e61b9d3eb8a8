"""Adapters against PEFT, and the bits of their rows in any batch and any division."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics, WeightFormat
from engine.core.request import Request, SampledToken, SamplingParams
from models.loader import ModelDescription
from runtime.errors import ConfigError, InternalError
from runtime.model_files.adapter_folders import CONFIG, WEIGHTS
from tests.models.conftest import CheckpointMaker
from tests.support.models.adapters import adapted_oracle, with_adapters, write_adapter
from tests.support.models.single_stage import StageDriver
from tests.support.pool.local_pool import local_pool

PROMPT = torch.randint(3, 240, (90,), generator=torch.Generator().manual_seed(7)).tolist()
OTHERS = {1: PROMPT[3:70], 2: PROMPT[:1], 3: PROMPT[20:89]}
STEPS = [17, 200, 5]
TOLERANCE = 2e-4
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture
def adapters(checkpoint: CheckpointMaker, tmp_path: Path) -> Path:
    """Return a folder with adapters of the tiny Llama: two ranks, and other targets."""
    model, folder = checkpoint("llama", dtype=torch.bfloat16), tmp_path / "adapters"
    write_adapter(folder / "all", model, seed=1)
    write_adapter(folder / "attention", model, seed=2, targets=ATTENTION)
    write_adapter(folder / "wide", model, seed=3, rank=12, use_rslora=True)
    write_adapter(
        folder / "some-layers", model, seed=4, targets=ATTENTION, layers_to_transform=[1, 2]
    )
    write_adapter(folder / "head", model, seed=5, targets=["lm_head"])
    return folder


@pytest.mark.parametrize(
    ("family", "targets", "options"),
    [
        ("llama", "all-linear", {}),
        ("llama", ["q_proj", "down_proj"], {"use_rslora": True, "lora_alpha": 3}),
        (
            "llama",
            "all-linear",
            {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 40}},
        ),
        ("llama_tied_bias", "all-linear", {}),
        ("llama", [*ATTENTION, "gate_proj", "lm_head"], {}),
        ("qwen3_5_text", "all-linear", {}),
        ("gemma3", "all-linear", {}),
        ("gemma4", ["q_proj", "o_proj", "down_proj"], {}),
        ("qwen3_5_moe_text", r".*(shared_expert\.up_proj|o_proj)", {}),
        ("kimi_linear", [*ATTENTION], {}),
        ("deepseek_v3", ["o_proj", "q_b_proj", "kv_a_proj_with_mqa"], {}),
        ("deepseek_v3", ["o_proj"], {"target_parameters": STACKS}),
        ("qwen3_moe", "all-linear", {}),
        ("glm4_moe", "all-linear", {"use_rslora": True}),
        ("mixtral", "all-linear", {}),
        ("minimax_m2", "all-linear", {}),
        ("qwen3_next", [], {"target_parameters": ["mlp.experts.down_proj"]}),
        ("gpt_oss", ["o_proj", "q_proj"], {"target_parameters": STACKS}),
        ("gpt_oss_square", ["q_proj"], {"target_parameters": STACKS}),
        ("llama4", ["q_proj"], {"target_parameters": STACKS, "alpha_pattern": {"down_proj": 3}}),
    ],
)
def test_logits_are_those_of_peft(
    family: str,
    targets: str | list[str],
    options: dict[str, Any],
    checkpoint: CheckpointMaker,
    tmp_path: Path,
) -> None:
    model = checkpoint(family)
    adapter = write_adapter(tmp_path / "a" / "x", model, seed=5, targets=targets, **options)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        expected = adapted_oracle(model, adapter)(tokens, use_cache=False).logits[0]
    driver = StageDriver(with_adapters(model, tmp_path / "a"))
    plain = driver.prefill({1: PROMPT})
    driver.adapters = {0: "x"}
    torch.testing.assert_close(
        driver.prefill({0: PROMPT[:-3]})[0], expected[-4], atol=TOLERANCE, rtol=0
    )
    for place in (-3, -2, -1):
        found = driver.decode({0: PROMPT[place]})[0]
        torch.testing.assert_close(found, expected[place], atol=TOLERANCE, rtol=0)
    assert (plain[0] - expected[-1]).abs().max() > 0.1, "the adapter changes the answer"


def run_alone(driver: StageDriver, adapter: str, chunk_tokens: int = len(PROMPT)) -> list[Tensor]:
    """Return the logits of the prompt's end and of each following step."""
    driver.adapters = {0: adapter} if adapter else {}
    for start in range(0, len(PROMPT), chunk_tokens):
        chunk = PROMPT[start : start + chunk_tokens]
        logits = driver.prefill({0: chunk}, samples=start + chunk_tokens >= len(PROMPT))
    return [logits, *(driver.decode({0: token}) for token in STEPS)]


@pytest.mark.parametrize("adapter", ["", "all", "attention", "head", "some-layers", "wide"])
def test_a_row_has_the_same_bits_in_any_batch(
    adapter: str, adapters: Path, checkpoint: CheckpointMaker
) -> None:
    model = with_adapters(checkpoint("llama", dtype=torch.bfloat16), adapters)
    expected = run_alone(StageDriver(model), adapter)
    for others in (("wide", "", "all"), ("some-layers", "all", "head")):
        driver = StageDriver(model)
        driver.adapters = {0: adapter} | dict(enumerate(others, 1))
        found = [driver.prefill({1: OTHERS[1], 0: PROMPT, 2: OTHERS[2], 3: OTHERS[3]})[1:2]]
        for token in STEPS:
            found.append(driver.decode({3: 9, 2: 11, 0: token, 1: 13})[2:3])
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), f"step {step} beside {others}"


@pytest.mark.parametrize("adapter", ["all", "wide"])
def test_chunks_and_cuts_change_no_bit(
    adapter: str, adapters: Path, checkpoint: CheckpointMaker
) -> None:
    model = with_adapters(checkpoint("llama", dtype=torch.bfloat16), adapters)
    expected = run_alone(StageDriver(model), adapter)
    for cuts, chunk_tokens in (((), 7), ((1,), 33), ((2, 3), 90)):
        found = run_alone(StageDriver(model, cuts=cuts), adapter, chunk_tokens)
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), f"step {step} with cuts {cuts}"


def answers(
    description: ModelDescription, names: list[str], num_stages: int = 1, tp: int = 1
) -> list[list[SampledToken]]:
    """Return the output for one prompt per adapter, all at once."""
    keys = {"": "", **{adapter.name: adapter.key for adapter in description.adapters}}
    requests = [
        Request(
            f"r{place}",
            tuple(PROMPT[place : 40 + 10 * place]),
            6,
            SamplingParams(temperature=0.8 * (place % 2), seed=place),
            num_top_logprobs=3,
            adapter=keys[name],
        )
        for place, name in enumerate(names)
    ]
    with local_pool(description, num_stages, tp=tp) as pool:
        return [answer.tokens for answer in pool.generate(requests)]


@pytest.mark.parametrize(
    ("num_stages", "tp", "weights"),
    [(2, 1, "model"), (1, 2, "model"), (2, 2, "model"), (1, 2, "int8")],
)
def test_stages_and_ranks_give_the_bits_of_one_process(
    num_stages: int, tp: int, weights: str, adapters: Path, checkpoint: CheckpointMaker
) -> None:
    model = checkpoint("llama", dtype=torch.bfloat16)
    description = with_adapters(model, adapters, weight_format=WeightFormat(weights))
    names = ["all", "", "wide", "attention", "head"]
    expected = answers(description, names)
    assert answers(description, names, num_stages, tp) == expected
    alone = [answers(description, [""] * place + [name])[place] for place, name in enumerate(names)]
    assert alone == expected


def test_a_hybrid_on_ranks_gives_the_bits_of_one_process(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    model = checkpoint("qwen3_5_text", dtype=torch.bfloat16)
    write_adapter(tmp_path / "a", model, seed=5)
    write_adapter(tmp_path / "b", model, seed=6, rank=3)
    description, names = with_adapters(model, tmp_path), ["a", "b", "", "a"]
    assert answers(description, names, 2, 2) == answers(description, names)


@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_whose_heads_differ_give_the_bits_of_one_process(
    tp: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    model = checkpoint("llama_nine_heads", dtype=torch.bfloat16)
    write_adapter(tmp_path / "a", model, seed=5)
    write_adapter(tmp_path / "b", model, seed=6, rank=3)
    description, names = with_adapters(model, tmp_path), ["a", "b", "", "a"]
    assert answers(description, names, 1, tp) == answers(description, names)


def apart(adapter: Path, num_experts: int, folder: Path) -> Path:
    """Write an adapter of stacked experts with the factors of each expert, as PEFT did with the
    modules of transformers 4."""
    shutil.copytree(adapter, folder)
    config = json.loads((adapter / CONFIG).read_text())
    rank = config["r"]
    config |= {"target_parameters": None, "rank_pattern": {"(gate|up)_proj": 2 * rank}}
    config["alpha_pattern"] = {"(gate|up)_proj": 2 * config["lora_alpha"]}
    (folder / CONFIG).write_text(json.dumps(config))
    tensors = dict[str, Tensor]()
    stacks = {"base_layer.": ("gate_proj", "up_proj"), "": ("down_proj",)}
    for key, tensor in load_file(adapter / WEIGHTS).items():
        found = re.fullmatch(r"(.*experts\.)(base_layer\.)?(lora_[AB]\.weight)", key)
        if found is None:
            tensors[key] = tensor
            continue
        names = stacks[found[2] or ""]
        for expert in range(num_experts):
            parts = (
                [tensor.chunk(num_experts)[expert]] * len(names)
                if "lora_A" in key
                else tensor[:, expert::num_experts].chunk(len(names))
            )
            for name, part in zip(names, parts, strict=True):
                tensors[f"{found[1]}{expert}.{name}.{found[3]}"] = part.clone().contiguous()
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("family", "num_stages", "tp"),
    [("qwen3_moe", 2, 1), ("qwen3_moe", 1, 2), ("glm4_moe", 2, 2), ("gpt_oss", 1, 2)],
)
def test_experts_on_stages_and_ranks_give_the_bits_of_one_process(
    family: str, num_stages: int, tp: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    model = checkpoint(family, dtype=torch.bfloat16)
    targets: dict[str, Any] = (
        {"targets": ["q_proj"], "target_parameters": STACKS} if family == "gpt_oss" else {}
    )
    for seed, (name, rank) in enumerate((("a", 8), ("b", 3), ("c", 8)), 5):
        write_adapter(tmp_path / name, model, seed=seed, rank=rank, **targets)
    description, names = with_adapters(model, tmp_path), ["a", "b", "", "c", "a"]
    expected = answers(description, names)
    assert answers(description, names, num_stages, tp) == expected
    alone = [answers(description, [""] * place + [name])[place] for place, name in enumerate(names)]
    assert alone == expected


@pytest.mark.parametrize(("family", "num_experts"), [("qwen3_moe", 5), ("glm4_moe", 6)])
def test_experts_apart_have_the_bits_of_stacked_ones(
    family: str, num_experts: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    model = checkpoint(family, dtype=torch.bfloat16)
    stacked = write_adapter(tmp_path / "stacked" / "a", model, seed=5)
    apart(stacked, num_experts, tmp_path / "apart" / "a")
    found, expected = (
        answers(with_adapters(model, tmp_path / form), ["a", "", "a"])
        for form in ("apart", "stacked")
    )
    assert found == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss_square"])
def test_factors_of_stacks_may_be_swapped(
    family: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """As PEFT before 0.19 wrote those of [experts, out, in], and 0.19 those of [experts, in, out],
    of which published ones have square down projections."""
    model, num_experts = checkpoint(family), 5
    stacked = write_adapter(
        tmp_path / "now" / "a", model, seed=5, targets=["q_proj"], target_parameters=STACKS
    )
    before = Path(shutil.copytree(stacked, tmp_path / "before" / "a"))
    tensors = load_file(stacked / WEIGHTS)
    for key in [key for key in tensors if "experts" in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        downs = tensors[key].chunk(num_experts)
        ups = [tensors[other][:, expert::num_experts] for expert in range(num_experts)]
        tensors[key] = torch.cat([up.T for up in ups]).contiguous()
        tensors[other] = torch.stack([down.T for down in downs], dim=2).flatten(1).contiguous()
    save_file(tensors, before / WEIGHTS)
    found, expected = (
        run_alone(driver, "a")
        for driver in (StageDriver(with_adapters(model, each.parent)) for each in (before, stacked))
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("num_experts", "says"),
    [
        (4, r"adapter 'a\w*' updates 4 of the 5 experts of layers.0.mlp.experts.gate_up_proj/"),
        (6, r"adapter a updates what Baton cannot update in this model: layers.0.mlp.experts.5"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_another_number_of_experts_is_refused(
    num_experts: int, says: str, tp: int, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    model = checkpoint("qwen3_moe")
    stacked = write_adapter(tmp_path / "stacked" / "a", model, seed=5)
    tensors = load_file(stacked / WEIGHTS)
    for key, tensor in tensors.items():
        if ".experts." in key:
            each = [tensor] if "lora_A" in key else [tensor.T]
            rows = len(each[0]) // 5 * num_experts
            taken = torch.cat([each[0], each[0]])[:rows]
            tensors[key] = (taken if "lora_A" in key else taken.T).contiguous()
    save_file(tensors, stacked / WEIGHTS)
    with pytest.raises(ConfigError, match=says):
        answers(with_adapters(model, tmp_path / "stacked"), ["a"], tp=tp)


def test_adapters_of_a_stage_are_those_of_its_layers(
    adapters: Path, checkpoint: CheckpointMaker
) -> None:
    driver = StageDriver(with_adapters(checkpoint("llama", dtype=torch.bfloat16), adapters))
    driver.adapters = {0: "absent"}
    with pytest.raises(InternalError, match="this stage has no adapters"):
        driver.prefill({0: PROMPT})


def test_an_adapter_of_another_model_is_refused(
    checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "x", checkpoint("qwen3_5_text"), seed=1)
    description = with_adapters(checkpoint("llama"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"adapter x updates what Baton cannot update in this model: layers\.0"
    ):
        description.load_stage(LayerRange(0, 2), numerics=Numerics.EXACT)
