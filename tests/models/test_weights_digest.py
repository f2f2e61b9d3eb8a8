"""Every byte of the weights counts, and how layers are split does not."""

import json
import struct
from pathlib import Path

import pytest

from engine.core.layer_range import LayerRange, get_pp_indices
from engine.core.numerics import Numerics
from models.decoder import EMBEDDING
from models.loader import read_model
from models.weights_digest import PoolWeights, StageDigests, WeightsDigest, check_copies
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.digests import check_compatible
from runtime.errors import IncompatiblePeerError
from tests.models.conftest import CheckpointMaker


def read_stages(folder: Path, size: int) -> PoolWeights:
    """Read the stages of a pool of this size; return their combined digests."""
    model = read_model(folder)
    stages = []
    for rank in range(size):
        digest = WeightsDigest()
        layers = get_pp_indices(model.facts.num_layers, rank, size, None)
        model.load_stage(layers, numerics=Numerics.FAST, digest=digest)
        copies = () if rank == 0 else (EMBEDDING,)
        stages.append(StageDigests(digest.total(without=copies), digest.of(copies)))
    return PoolWeights.of(stages)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_moe", "glm_moe_dsa"])
def test_any_split_gives_one_digest(checkpoint: CheckpointMaker, family: str) -> None:
    folder = checkpoint(family)
    whole = read_stages(folder, 1)
    assert [read_stages(folder, size) for size in (2, 3, 4)] == [whole] * 3


def tensor_bytes(file: Path) -> dict[str, tuple[int, int]]:
    """Return the first byte and end of every tensor."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    return {
        name: (8 + length + fields["data_offsets"][0], 8 + length + fields["data_offsets"][1])
        for name, fields in header.items()
        if name != "__metadata__"
    }


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def test_one_flipped_bit_of_any_tensor_is_another_revision(broken: Path) -> None:
    file = broken / "model.safetensors"
    model = read_model(broken)
    original = read_stages(broken, 1)
    revision = original.revision(model.facts.revision)
    assert read_stages(broken, 1).revision(model.facts.revision) == revision
    for name, (start, end) in tensor_bytes(file).items():
        for place in (start, end - 1):
            flip(file, place)
            assert read_stages(broken, 1).revision(model.facts.revision) != revision, (
                f"{name} at {place}"
            )
            flip(file, place)
    assert read_stages(broken, 1) == original


def test_a_tensor_of_zeros_is_another_revision(broken: Path) -> None:
    file = broken / "model.safetensors"
    original = read_stages(broken, 2)
    start, end = tensor_bytes(file)["model.layers.3.mlp.down_proj.weight"]
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes(end - start))
    assert read_stages(broken, 2) != original


def test_pools_with_other_weights_do_not_pair(checkpoint: CheckpointMaker, broken: Path) -> None:
    """All tensors of one layer are zero in the second checkpoint: names, types, shapes and sizes
    are the same."""
    with (broken / "model.safetensors").open("r+b") as stream:
        for name, (start, end) in tensor_bytes(broken / "model.safetensors").items():
            if ".layers.2." in name:
                stream.seek(start)
                stream.write(bytes(end - start))
    mine, theirs = (
        plan_stage(WorkerConfig(model=folder, num_pages=8)).compatibility(read_stages(folder, size))
        for folder, size in ((checkpoint("llama"), 2), (broken, 1))
    )
    with pytest.raises(
        IncompatiblePeerError, match=r"differ in weights \([0-9a-f]{12} here, [0-9a-f]{12} there\)"
    ):
        check_compatible(mine, theirs.digest, theirs.text)


def test_pools_with_another_config_do_not_pair(checkpoint: CheckpointMaker, broken: Path) -> None:
    """Somebody has edited a file of settings on one host; the weights are the same, and are not
    said to differ."""
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps(config | {"rms_norm_eps": 2 * config["rms_norm_eps"]})
    )
    mine, theirs = (
        plan_stage(WorkerConfig(model=folder, num_pages=8)).compatibility(read_stages(folder, 1))
        for folder in (checkpoint("llama"), broken)
    )
    with pytest.raises(
        IncompatiblePeerError, match=r"differ in config \([0-9a-f]{12} here, [0-9a-f]{12} there\): "
    ):
        check_compatible(mine, theirs.digest, theirs.text)


def test_two_tensors_that_changed_places_are_another_set() -> None:
    first, second = WeightsDigest(), WeightsDigest()
    for digest, names in ((first, "ab"), (second, "ba")):
        for name, content in zip(names, (b"one", b"two"), strict=True):
            digest.add(name, "F32 [3]", content)
    assert first.total() != second.total()


def test_a_tensor_that_is_read_twice_counts_once() -> None:
    digest = WeightsDigest()
    digest.add("a", "F32 [3]", b"one")
    once = digest.total()
    digest.add("a", "F32 [3]", b"one")
    assert digest.total() == once


def test_a_copy_with_other_bytes_is_named() -> None:
    check_copies({"a": "1"}, {"a": "1", "b": "2"}, stage=1)
    with pytest.raises(IncompatiblePeerError, match="stage 1 has read a different a than stage 0"):
        check_copies({"a": "1"}, {"a": "3"}, stage=1)


def test_a_tied_head_is_a_copy_on_the_last_stage(checkpoint: CheckpointMaker) -> None:
    model = read_model(checkpoint("llama"))
    if not model.spec.tied_head:
        model = read_model(checkpoint("qwen3_5_text"))
    first, last = WeightsDigest(), WeightsDigest()
    model.load_stage(LayerRange(0, 2), numerics=Numerics.FAST, digest=first)
    model.load_stage(LayerRange(2, model.facts.num_layers), numerics=Numerics.FAST, digest=last)
    if model.spec.tied_head:
        assert last.of((EMBEDDING,)) == first.of((EMBEDDING,)) != {}
    else:
        assert last.of((EMBEDDING,)) == {}
