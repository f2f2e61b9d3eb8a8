"""The benchmark of a whole cluster on a device, over a tiny model on the host."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.values import Completion, Finish, FinishReason, Timings, Usage
from bench.gpu_cluster import OUTPUT_TOKENS, measure, summary, write_checkpoint
from bench.gpu_configs import LLAMA_8B
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from models.loader import read_model
from runtime.errors import BatonError

TINY = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
TIMINGS = Timings(prefill_s=0.4, transfer_exposed_s=0.02, decode_s=0.31)


def answer(timings: Timings, num_tokens: int = OUTPUT_TOKENS) -> Completion:
    return Completion(
        "",
        (7,) * num_tokens,
        (),
        Finish("r", FinishReason.LENGTH, None, None, Usage(5, num_tokens), timings),
    )


async def test_a_written_checkpoint_is_served_and_measured(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, TINY, torch.device("cpu"), shard_bytes=60_000)
    assert len(list(model.glob("*.safetensors"))) > 2
    read_model(model).load_stage(
        LayerRange(1, 4), numerics=Numerics.EXACT
    )  # names and shapes are a checkpoint's
    values = await measure(model, "cpu", prompt_tokens=150, prompts=2)
    assert all(float(str(values[name])) > 0 for name in ("prefill_ms", "decode_step_ms"))
    assert 0 <= float(str(values["exposed_of_prefill"])) < 100


def test_shares_are_of_medians() -> None:
    """Exposed 10, 20 and 60 ms of 400 ms each; 31 steps of 10 ms."""
    given = [replace(TIMINGS, transfer_exposed_s=seconds) for seconds in (0.01, 0.06, 0.02)]
    assert summary([answer(timings) for timings in given]) == pytest.approx(
        {"prefill_ms": 400, "exposed_ms": 20, "exposed_of_prefill": 0.05, "decode_step_ms": 10}
    )


@pytest.mark.parametrize(
    "bad", [answer(replace(TIMINGS, prefill_s=None)), answer(TIMINGS, num_tokens=3)]
)
def test_an_uncountable_response_is_an_error(bad: Completion) -> None:
    with pytest.raises(BatonError):
        summary([answer(TIMINGS), bad])
