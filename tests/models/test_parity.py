"""Logits against transformers, fp32: prefill and ten cached steps, at the lengths where something
changes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from models.loader import read_model
from tests.models.conftest import CheckpointMaker
from tests.support.models.checkpoints import FAMILY_NAMES, RELATED_NAMES, oracle
from tests.support.models.single_stage import StageDriver

PAGE_SIZE = 16
# The convolution's edge, a page, the chunk grid of the recurrence and twice that.
PROMPT_LENGTHS = (1, 2, 3, 4, 5, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 63, 64, 65, 127, 128, 129)
NUM_STEPS = 10
TOLERANCE = 1e-4
# Kinds in which transformers cannot run a share, or have one; and no rope.
OTHER_ROPE = (
    "llama",
    "llama_yarn",
    "llama_linear",
    "llama4",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "deepseek_v3",
    "kimi_linear",
)


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *RELATED_NAMES])
def test_logits_match_transformers(name: str, checkpoint: CheckpointMaker) -> None:
    path = checkpoint(name)
    tokens = torch.randint(
        3, 240, (PROMPT_LENGTHS[-1] + NUM_STEPS,), generator=torch.Generator().manual_seed(5)
    )
    with torch.no_grad():
        expected = oracle(path)(tokens[None], use_cache=False).logits[0]
    driver = StageDriver(read_model(path), page_size=PAGE_SIZE, num_sequences=len(PROMPT_LENGTHS))
    rows = range(len(PROMPT_LENGTHS))
    for row, length in enumerate(PROMPT_LENGTHS):
        logits = driver.prefill({row: tokens[:length].tolist()})
        torch.testing.assert_close(logits[0], expected[length - 1], atol=TOLERANCE, rtol=0)
    for step in range(NUM_STEPS):
        at = [length + step for length in PROMPT_LENGTHS]
        logits = driver.decode({row: int(tokens[at[row]]) for row in rows})
        torch.testing.assert_close(logits, expected[at], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name not in OTHER_ROPE])
def test_partial_rotary_dimensions_are_those_of_transformers(
    name: str, checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    """A config may say `partial_rotary_factor` of any family, and most of them take no notice of
    it."""
    path = Path(shutil.copytree(checkpoint(name), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config)["rope_parameters"]["partial_rotary_factor"] = 0.75
    (path / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(3, 240, (40,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = oracle(path)(tokens[None], use_cache=False).logits[0, -1:]
    found = StageDriver(read_model(path), page_size=PAGE_SIZE).prefill({0: tokens.tolist()})
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama_tied_bias", "qwen3_5_text"])
def test_bfloat16_is_as_close_to_the_truth_as_transformers(
    name: str, checkpoint: CheckpointMaker
) -> None:
    path = checkpoint(name, dtype=torch.bfloat16)
    tokens = torch.randint(3, 240, (90,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = oracle(path)(tokens[None], use_cache=False).logits[0, 63:].float()
        truth = oracle(path, dtype=torch.float32)(tokens[None], use_cache=False).logits[0, 63:]
    driver = StageDriver(read_model(path), page_size=PAGE_SIZE)
    ours = [driver.prefill({0: tokens[:64].tolist()})[0]]
    ours += [driver.decode({0: int(token)})[0] for token in tokens[64:]]
    assert (torch.stack(ours) - truth).abs().mean() < 1.2 * (theirs - truth).abs().mean()
