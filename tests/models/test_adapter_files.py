"""Adapters' files: what is refused, what distinguishes two adapters, and what memory they count."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from models.adapters import MAX_RANK, read_adapters
from models.loader import read_model
from pool.check import report
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.errors import ConfigError, IncompatiblePeerError
from runtime.model_files.adapter_folders import CONFIG, MAX_ADAPTERS, WEIGHTS
from tests.models.conftest import CheckpointMaker
from tests.support.models.adapters import write_adapter
from transfer.plan.compatibility import check_settings

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, checkpoint: CheckpointMaker) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    return write_adapter(folder / "good", checkpoint("llama"), seed=1, targets=["q_proj"])


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    """Return a private copy of an adapter, to damage."""
    return Path(shutil.copytree(written, tmp_path / "adapters" / "good"))


def configure(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **fields}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def target_both_stacks(folder: Path) -> None:
    """Let a file with one pair of factors of experts state two."""
    configure(folder, target_parameters=["gate_up_proj", "mlp.experts.down_proj"])
    tensors = {
        key.replace("layers.2.self_attn.q_proj", "layers.2.mlp.experts"): each
        for key, each in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / WEIGHTS)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: configure(folder, peft_type="LOHA"), 'peft_type "LOHA" is not supported'),
        (lambda folder: configure(folder, use_dora=True), "use_dora true is not supported"),
        (lambda folder: configure(folder, bias="all"), 'bias "all" is not supported'),
        (
            lambda folder: configure(folder, modules_to_save=["lm_head"]),
            "modules_to_save .* is not supported",
        ),
        (
            lambda folder: configure(folder, target_parameters=["mlp.experts.down_proj_bias"]),
            "target_parameters 'mlp.experts.down_proj_bias' is not supported",
        ),
        (
            lambda folder: configure(folder, target_parameters="mlp.experts.down_proj"),
            "target_parameters is no list of names",
        ),
        (
            target_both_stacks,
            r"layers.2.mlp.experts has the factors [^,]*, its config targets gate_up_proj, down_proj",
        ),
        (lambda folder: configure(folder, r=4), "has rank 8, its config states 4"),
        (lambda folder: configure(folder, r=3), "has rank 8, its config states 3"),
        (
            lambda folder: configure(folder, r=MAX_RANK + 1),
            f"has rank {MAX_RANK + 1}, not one from 1 to {MAX_RANK}",
        ),
        (lambda folder: configure(folder, lora_alpha="much"), "lora_alpha .* is no number"),
        (lambda folder: configure(folder, rank_pattern=[1]), "rank_pattern is no object"),
        (lambda folder: configure(folder, rank_pattern={"(": 1}), "rank_pattern has the key"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "is no config of an adapter"),
        (lambda folder: (folder / CONFIG).write_text("[" * 100_000), "cannot be read"),
        (lambda folder: (folder / CONFIG).unlink(), f"has no {CONFIG}"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
        (lambda folder: cut(folder / WEIGHTS, 5), "cannot be read"),
        (lambda folder: cut(folder / WEIGHTS, 4000), "cannot be read"),
        (
            lambda folder: rewrite(folder, lambda held: held.pop(f"{Q_PROJ}.lora_A.weight")),
            "has only one of its two factors",
        ),
        (
            lambda folder: rewrite(
                folder, lambda held: held.update({f"{Q_PROJ}.lora_A.weight": torch.zeros(7, 72)})
            ),
            r"has factors \[7, 72\] and \[80, 8\]",
        ),
        (
            lambda folder: rewrite(folder, lambda held: held.update(rest=torch.zeros(1))),
            "rest is no factor of a linear layer",
        ),
        (lambda folder: rewrite(folder, dict.clear), "has no tensors"),
        (lambda folder: folder.rename(folder.with_name("a b")), "is no name of an adapter"),
        (lambda folder: folder.rename(folder.with_name("x" * 65)), "is no name of an adapter"),
        (
            lambda folder: [
                (folder.parent / f"n{number}").mkdir() for number in range(MAX_ADAPTERS)
            ],
            f"has {MAX_ADAPTERS + 1} folders of adapters",
        ),
        (lambda folder: shutil.rmtree(folder.parent), "cannot be read"),
    ],
)
def test_a_bad_adapter_is_refused(copy: Path, change: Callable[[Path], Any], says: str) -> None:
    folder = copy.parent
    assert [adapter.name for adapter in read_adapters(folder)] == ["good"]
    change(copy)
    with pytest.raises(ConfigError, match=says) as caught:
        read_adapters(folder)
    assert caught.value.field == "adapters"


def test_hidden_folders_and_files_are_no_adapters(copy: Path) -> None:
    (copy.parent / ".cache").mkdir()
    (copy.parent / "README.md").touch()
    (copy.parent / "empty").mkdir()
    assert read_adapters(copy.parent / "empty") == ()
    (copy.parent / "empty").rmdir()
    assert [adapter.name for adapter in read_adapters(copy.parent)] == ["good"]


def test_the_digest_covers_all_that_an_adapter_computes_with(copy: Path) -> None:
    def digest() -> str:
        return read_adapters(folder)[0].digest

    folder = copy.parent
    found = [digest()]
    configure(copy, base_model_name_or_path="elsewhere", inference_mode=True)
    assert digest() == found[0], "what only names or trains it is ignored"
    configure(copy, lora_alpha=17)
    found.append(digest())
    configure(copy, use_rslora=True)
    found.append(digest())
    rewrite(copy, lambda held: held[f"{Q_PROJ}.lora_B.weight"].mul_(-1))
    found.append(digest())
    copy.rename(copy.with_name("other"))
    found.append(digest())
    assert len(set(found)) == len(found)


def test_memory_counts_the_room_for_adapters(copy: Path, checkpoint: CheckpointMaker) -> None:
    config = WorkerConfig(model=checkpoint("llama", dtype=torch.bfloat16), num_pages=8)
    plain = plan_stage(config).description
    for given, megabytes in ((None, 64), (3, 3)):
        settings = {"adapters": copy.parent, "adapters_mb": given}
        adapted = plan_stage(config.model_copy(update=settings)).description
        for layers in (LayerRange(0, 4), LayerRange(1, 2)):
            more = adapted.weight_bytes(layers) - plain.weight_bytes(layers)
            assert more == (megabytes << 20) * len(layers) // 4


def test_a_stage_loads_the_first_adapters_that_fit(copy: Path, checkpoint: CheckpointMaker) -> None:
    for name in ("better", "worse"):
        shutil.copytree(copy, copy.parent / name)
    model = read_model(checkpoint("llama"))
    adapters = read_adapters(copy.parent)
    each = model.bytes_of(adapters[0])
    assert each == sum(tensor.nbytes for tensor in load_file(copy / WEIGHTS).values())
    for room, count in ((3 * each, 3), (3 * each - 1, 2), (each, 1), (each - 1, 0), (None, 3)):
        known = replace(model, adapters=adapters, adapter_bytes=room)
        assert known.first_adapters == adapters[:count]
        stage = known.load_stage(LayerRange(0, 1), numerics=Numerics.EXACT)
        assert stage.adapters.rows.names == tuple(adapter.key for adapter in adapters[:count])


def test_stages_compare_the_room_for_adapters(copy: Path, checkpoint: CheckpointMaker) -> None:
    config = WorkerConfig(model=checkpoint("llama"), num_pages=8)
    plain = plan_stage(config)
    settings = {"adapters": copy.parent}
    adapted = plan_stage(config.model_copy(update=settings))
    wider = plan_stage(config.model_copy(update={**settings, "adapters_mb": 65}))
    for theirs in (plain, wider):
        with pytest.raises(IncompatiblePeerError, match="adapter_bytes is"):
            check_settings(adapted.settings, theirs.settings)


def test_the_check_of_a_model_checks_its_adapters(copy: Path, checkpoint: CheckpointMaker) -> None:
    config = WorkerConfig(
        model=checkpoint("llama"), adapters=copy.parent, memory_mb=1, world_size=4, tp=2
    )
    assert "adapters: good" in list(report(config))
    name = f"{Q_PROJ}.lora_B.weight"
    rewrite(copy, lambda held: held.update({name: torch.zeros(81, 8)}))
    with pytest.raises(ConfigError, match=r"q_proj is \[81, 72\], the model's .* is \[80, 72\]"):
        list(report(config))
