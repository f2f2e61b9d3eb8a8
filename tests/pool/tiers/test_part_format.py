"""Objects of tiers as files: others can open them, and whatever is done to them, no wrong byte is
accepted."""

import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.core.layer_range import LayerRange, TensorRank
from pool.tiers.block_store import Content, StagePart
from pool.tiers.folder import read_file, write_file
from pool.tiers.part_format import PUBLIC_KEY, PartLayout
from tests.pool.tiers.caches import specs

NAME, OTHER = b"n" * 16, b"o" * 16
PART = StagePart(LayerRange(0, 3), TensorRank(1, 2))
LAYOUT = PartLayout(specs(), Content.PAGE, PART)
DICE = random.Random(11)
RECORDS = [memoryview(bytearray(DICE.randbytes(spec.record_bytes))) for spec in LAYOUT.of_part]


def write_part(
    path: Path,
    layout: PartLayout,
    name: bytes,
    records: Sequence[memoryview],
    key: bytes = PUBLIC_KEY,
) -> None:
    write_file(path, layout.sealed(name, records, key))


def read_part(
    path: Path,
    layout: PartLayout,
    name: bytes,
    records: Sequence[memoryview],
    key: bytes = PUBLIC_KEY,
) -> bool:
    pieces = layout.blank(records)
    try:
        size = read_file(path, pieces)
    except OSError:
        return False
    return size == sum(map(len, pieces)) and layout.is_intact(name, pieces, key)


def fresh() -> list[memoryview]:
    return [memoryview(bytearray(len(record))) for record in RECORDS]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    write_part(path, LAYOUT, NAME, RECORDS)
    assert path.stat().st_mode & 0o777 == 0o600
    return path


def is_refused(path: Path, layout: PartLayout = LAYOUT, name: bytes = NAME) -> bool:
    return not read_part(path, layout, name, fresh())


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    records = fresh()
    assert read_part(path, LAYOUT, NAME, records)
    assert records == RECORDS
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_format_is_that_of_safetensors(path: Path) -> None:
    tensors = load_file(path)
    assert list(tensors) == ["layers.1.kv", "layers.1.latent", "seals"]
    kv = tensors["layers.1.kv"]
    assert kv.shape == (2, 2, 2, 3)
    assert kv.tobytes() == RECORDS[0].tobytes()
    assert tensors["layers.1.latent"].dtype == np.int32


def test_every_flipped_bit_is_found(path: Path) -> None:
    data = path.read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << DICE.randrange(8)
        path.write_bytes(damaged)
        assert is_refused(path), at
    path.write_bytes(data)
    assert not is_refused(path)


def test_every_other_length_is_found(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert is_refused(path), length
        path.write_bytes(data[:length].ljust(len(data), b"\0"))
        assert is_refused(path) or data[length:].strip(b"\0") == b"", length
    path.write_bytes(data + b"\0")
    assert is_refused(path)


def test_a_file_in_the_place_of_another_is_not_used(path: Path) -> None:
    assert is_refused(path, name=OTHER)
    for part in (
        StagePart(LayerRange(0, 3), TensorRank(0, 2)),
        StagePart(LayerRange(1, 3), TensorRank(1, 2)),
    ):
        assert is_refused(path, PartLayout(specs(), Content.PAGE, part))
    states = PartLayout(specs(), Content.STATE, PART)
    assert not read_part(path, states, NAME, [memoryview(bytearray(72)) for _ in states.of_part])


def test_tensors_cannot_change_places(path: Path) -> None:
    """Whole files with the header of one block and the tensors, or the seals, of another."""
    other = path.with_name("other")
    write_part(other, LAYOUT, OTHER, RECORDS)
    mine, theirs = path.read_bytes(), other.read_bytes()
    start, seals = len(LAYOUT.header(NAME)), -LAYOUT.num_seal_bytes
    assert len(mine) == len(theirs)
    assert mine[start:seals] == theirs[start:seals]
    for data in (mine[:start] + theirs[start:], theirs[:start] + mine[start:]):
        path.write_bytes(data)
        assert is_refused(path)
        assert is_refused(path, name=OTHER)


def test_only_holders_of_the_key_can_write_a_part(path: Path) -> None:
    """Without the key nothing is accepted that is not already there under the same name."""
    secret = DICE.randbytes(32)
    assert not read_part(path, LAYOUT, NAME, fresh(), secret)
    write_part(path, LAYOUT, NAME, RECORDS, secret)
    assert read_part(path, LAYOUT, NAME, fresh(), secret)
    assert is_refused(path)


def test_each_object_has_a_key_of_its_own() -> None:
    """GMAC must not authenticate different bytes with one key, and the same block may differ."""
    first, again = (LAYOUT.sealed(NAME, RECORDS, PUBLIC_KEY) for _ in range(2))
    assert first[:-1] == again[:-1]
    assert first[-1] != again[-1]
    assert first[-1][16:] != again[-1][16:]


def test_nothing_else_is_read(tmp_path: Path, path: Path) -> None:
    assert is_refused(tmp_path / "missing")
    assert is_refused(tmp_path)
    (tmp_path / "link").symlink_to(path)
    assert is_refused(tmp_path / "link")
    assert not is_refused(path)


def test_an_unfinished_file_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_part(tmp_path / "no folder" / "page", LAYOUT, NAME, RECORDS)
    (tmp_path / "page").mkdir()  # it cannot be replaced
    with pytest.raises(OSError, match="directory"):
        write_part(tmp_path / "page", LAYOUT, NAME, RECORDS)
    assert [file.name for file in tmp_path.iterdir()] == ["page"]


def test_a_write_that_the_kernel_cuts_short_is_continued(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, sizes = os.write, iter((1, 5, *[7] * 1000))
    monkeypatch.setattr(
        os, "writev", lambda descriptor, pieces: write(descriptor, b"".join(pieces)[:100])
    )
    monkeypatch.setattr(
        os, "write", lambda descriptor, piece: write(descriptor, piece[: next(sizes)])
    )
    write_part(tmp_path / "cut", LAYOUT, NAME, RECORDS)
    monkeypatch.undo()
    assert (tmp_path / "cut").stat().st_size == path.stat().st_size
    assert not is_refused(tmp_path / "cut")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, path: Path, share: float
) -> None:
    """The limit of file sizes makes the kernel write a part first, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(path.stat().st_size * share), limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_part(tmp_path / "cut", LAYOUT, NAME, RECORDS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [file for file in tmp_path.iterdir() if file != path]


def damaged(mine: bytes, theirs: bytes) -> bytes:
    """Return a file damaged in one of the ways that crashes, disks and mix-ups know."""
    at, until = sorted(DICE.choices(range(len(mine)), k=2))
    match DICE.randrange(6):
        case 0:  # torn
            return mine[:at]
        case 1:  # torn, and the rest never written
            return mine[:at] + bytes(len(mine) - at)
        case 2:  # flipped
            data = bytearray(mine)
            for _ in range(DICE.randint(1, 4)):
                data[DICE.randrange(len(data))] ^= 1 << DICE.randrange(8)
            return bytes(data)
        case 3:  # part of another block's file
            return mine[:at] + theirs[at:until] + mine[until:]
        case 4:  # bytes lost in the middle
            return mine[:at] + mine[until:] + bytes(until - at)
        case _:  # another block's file
            return theirs


@pytest.mark.long
def test_none_of_100_000_damaged_files_is_used(path: Path) -> None:
    other = path.with_name("other")
    records = [memoryview(bytearray(DICE.randbytes(len(record)))) for record in RECORDS]
    write_part(other, LAYOUT, OTHER, records)
    mine, theirs = path.read_bytes(), other.read_bytes()
    num_damaged = 0
    while num_damaged < 100_000:
        data = damaged(mine, theirs)
        if data == mine:
            continue
        num_damaged += 1
        path.write_bytes(data)
        assert is_refused(path), data.hex()
