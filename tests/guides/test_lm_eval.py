"""The model class for lm-evaluation-harness of docs/examples, with the real harness."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from runtime.model_files.tokenizer_files import cache_folder
from tests.guides.extension import ROOT
from tests.support.cluster.one_process import cluster_in_process

HARNESS = "lm_eval==0.4.13"
LIMIT_S = 280.0
MODEL = ROOT / "demo/model"
QUESTIONS = [
    {"text": "<|user|> Count from 3 by 2.<|end|><|assistant|>", "choices": [" 3 5 7", " 4 8"]},
    {"text": "Near the old mill Mona found a red", "choices": [" lantern", " 9 9 9"]},
]
TASK = """
task: counting
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def harness() -> Path:
    """Return the folder in which the harness is installed; skip the test if it is not available."""
    folder = cache_folder() / "tests" / HARNESS
    if not folder.is_dir():
        building = folder.with_suffix(".part")
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(building), HARNESS]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{HARNESS} was not fetched within {LIMIT_S:g} s")
        if done.returncode:
            pytest.skip(f"{HARNESS} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
        building.rename(folder)
    return folder


def logprob_by_transformers(text: str, choice: str) -> float:
    """Return the logprob of a continuation in float32."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    context = tokenizer.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode(text + choice, add_special_tokens=False).ids
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(len(context), len(ids)))


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 300)  # 741 MB are installed first
async def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    installed = harness()
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "counting.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
    async with cluster_in_process(MODEL) as client:
        arguments = f"target={client.targets[0]},tokenizer={MODEL}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "docs/examples/lm_eval_baton.py", "run", "--model", "baton"),
            *("--model_args", arguments, "--tasks", "counting", "--include_path", str(tmp_path)),
            *("--log_samples", "--output_path", str(tmp_path / "results")),
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{installed}",
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            },
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0, output.decode()
    assert "|counting|" in output.decode()
    (log,) = (tmp_path / "results").rglob("samples_counting_*.jsonl")
    samples = {each["doc_id"]: each for each in map(json.loads, log.read_text().splitlines())}
    for place, question in enumerate(QUESTIONS):
        for response, choice in zip(
            samples[place]["filtered_resps"], question["choices"], strict=True
        ):
            expected = logprob_by_transformers(str(question["text"]), choice)
            assert float(response[0]) == pytest.approx(expected, abs=0.3, rel=0.02)
        assert samples[place]["acc"] == 1.0
