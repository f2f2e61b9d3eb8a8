"""A whole cluster reads end tokens and sampling defaults from the model's files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.values import FinishReason, Query, Sampling, Stop, StructuredOutput
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.guided import spelled, write_character_tokenizer

PROMPT = (5, 6, 7, 8, 9)
END = "~"  # its id is its code point


def fine_tuned(checkpoint: Path, folder: Path, **generation: Any) -> Path:  # noqa: ANN401
    """Write the tiny checkpoint with its end token named in tokenizer_config.json alone."""
    path = Path(shutil.copytree(checkpoint, folder / "model"))
    write_character_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [], **generation}))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": END, "lstrip": False}})
    )
    return path


async def test_a_grammar_ends_with_the_tokenizers_token(checkpoint: Path, tmp_path: Path) -> None:
    """Workers force it where the text is over, and the router stops there."""
    (end,) = spelled(END)
    async with cluster_in_process(fine_tuned(checkpoint, tmp_path)) as client:
        assert (await client.model_info()).eos_token_ids == (end,)
        answer = await client.complete(
            Query(
                PROMPT,
                Sampling(temperature=0),
                Stop(max_tokens=20),
                structured_output=StructuredOutput(regex="cat|dog"),
            ),
            timeout_s=60,
        )
        assert answer.text in ("cat", "dog")
        assert answer.token_ids[:3] == spelled(answer.text)
        assert (answer.finish.reason, answer.finish.stop_token_id) == (FinishReason.STOP, end)
        free = await client.complete(
            Query(PROMPT, Sampling(logit_bias={end: 100.0}), Stop(max_tokens=20)), timeout_s=60
        )
        assert (free.finish.reason, free.finish.stop_token_id) == (FinishReason.STOP, end)


@pytest.mark.parametrize(("setting", "temperature"), [("auto", 0.0), ("none", 1.0)])
async def test_the_models_sampling_counts_unless_the_router_leaves_it_out(
    setting: str, temperature: float, checkpoint: Path, tmp_path: Path
) -> None:
    model = fine_tuned(checkpoint, tmp_path, do_sample=False)
    stop = Stop(max_tokens=16, ignore_eos=True)
    async with cluster_in_process(model, router={"generation_config": setting}) as client:
        assert (await client.model_info()).default_sampling.temperature == temperature
        greedy = await client.complete(Query(PROMPT, Sampling(temperature=0), stop), timeout_s=60)
        found = await client.complete(Query(PROMPT, Sampling(seed=1), stop), timeout_s=60)
        assert (found.token_ids == greedy.token_ids) is (setting == "auto")
