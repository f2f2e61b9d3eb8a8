"""Machine and release settings that stages and pools compare."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.memory.budget import decode_requests
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.errors import IncompatiblePeerError
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import make_checkpoint
from transfer.plan.compatibility import check_settings

ELSEWHERE = """
import json, sys
from pathlib import Path
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
print(json.dumps(dict(plan_stage(WorkerConfig(model=Path(sys.argv[1]), num_pages=8, numerics=sys.argv[2])).settings)))
"""


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_exact_numerics_refuse_a_stage_whose_cpu_computes_other_bits(
    tmp_path: Path, numerics: str
) -> None:
    """torch uses other instructions on another CPU: softmax and sums differ in their last bits.
    Such stages used to join each other, and other tokens were sampled."""
    model = make_checkpoint(tmp_path, "llama")
    here = plan_stage(
        WorkerConfig(model=model, num_pages=8, numerics="exact" if numerics == "exact" else "fast")
    )
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(model), numerics],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
    )
    there = json.loads(done.stdout)
    if numerics == "fast":
        check_settings(here.settings, there)
    else:
        with pytest.raises(
            IncompatiblePeerError, match=r"arithmetic is .* here, .* torch-[0-9.]+-default .* there"
        ):
            check_settings(here.settings, there)


def test_a_stage_of_a_release_with_other_frames_is_refused(tmp_path: Path) -> None:
    settings = plan_stage(
        WorkerConfig(model=make_checkpoint(tmp_path, "llama"), num_pages=8)
    ).settings
    with pytest.raises(
        IncompatiblePeerError, match=r"frames is [0-9a-f]{12} here, 000000000000 there"
    ):
        check_settings(settings, {**settings, "frames": "0" * 12})


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        (
            "tokenizer.json",
            {"model": {"vocab": {"a": 0}}},
            {"model": {"vocab": {"a": 1}}},
            "tokenizer is [0-9a-f]{16} here, [0-9a-f]{16} there",
        ),
        (
            "generation_config.json",
            {},
            {"eos_token_id": [9, 4]},
            "eos_token_ids is 2 here, 4 9 there",
        ),
    ],
)
def test_a_stage_with_another_grammar_vocabulary_is_refused(
    tmp_path: Path, file: str, before: dict[str, object], after: dict[str, object], words: str
) -> None:
    """The last stage makes masks from its own files: outputs followed another grammar than their
    request's."""
    model = make_checkpoint(tmp_path, "llama")
    found = []
    for content in (before, after):
        (model / file).write_text(json.dumps(content))
        found.append(plan_stage(WorkerConfig(model=model, num_pages=8)).settings)
    with pytest.raises(IncompatiblePeerError, match=words):
        check_settings(*found)


def test_a_stage_without_a_tokenizer_joins_any(tmp_path: Path) -> None:
    """Where one is made of other files, the hosts of a pool may not all have it; grammars are
    refused, then."""
    model = make_checkpoint(tmp_path, "llama")
    without = plan_stage(WorkerConfig(model=model, num_pages=8)).settings
    (model / "tokenizer.json").write_text("{}")
    with_one = plan_stage(WorkerConfig(model=model, num_pages=8)).settings
    assert without["tokenizer"] != with_one["tokenizer"]
    check_settings(without, with_one)
    check_settings(with_one, without)


def test_stages_with_different_numbers_of_tree_states_do_not_join(tmp_path: Path) -> None:
    """Pools of up to 32 hold three times what they run, so that both hold 33 requests here."""
    model, draft = (
        make_checkpoint(tmp_path, "qwen3_5_text"),
        save_draft(tmp_path / "eagle3", layers=(0, 1, 3)),
    )
    here, there = (
        plan_stage(
            WorkerConfig(model=model, draft=draft, num_pages=64, max_running=max_running),
            max_held=decode_requests(max_running),
            speculates=True,
        )
        for max_running in (11, 33)
    )
    assert (here.max_held, there.max_held, here.num_scratch, there.num_scratch) == (33, 33, 12, 34)
    with pytest.raises(IncompatiblePeerError, match=r"differ: max_running is 11 here, 33 there$"):
        check_settings(here.settings, there.settings)
