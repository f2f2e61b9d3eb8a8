from hashlib import blake2b

import pytest

from runtime.digests import NAME_BYTES, block_names


def names(
    ids: list[int], salt: str = "", compatibility: str = "weights 1", adapter: str = ""
) -> tuple[bytes, ...]:
    return block_names(ids, 4, compatibility=compatibility, salt=salt, adapter=adapter)


def test_a_name_is_the_digest_of_the_name_before_and_its_ids() -> None:
    first = blake2b(b"9:weights 1tenant", digest_size=16).digest()
    second = blake2b(
        first + b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\xff\xff\x03\0", digest_size=16
    ).digest()
    assert names([1, 2, 3, 0x3FFFF], salt="tenant") == (second,)
    assert len(second) == NAME_BYTES


def test_only_whole_blocks_have_names() -> None:
    assert names([]) == names([1, 2, 3]) == ()
    assert [len(names(list(range(count)))) for count in (4, 7, 8, 9)] == [1, 1, 2, 2]


def test_prompts_share_names_up_to_the_block_in_which_they_differ() -> None:
    whole, parted = names(list(range(16))), names([*range(9), 99, *range(10, 16)])
    assert [a == b for a, b in zip(whole, parted, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "b"},
        {"compatibility": "weights 2"},
        {"compatibility": "weights", "salt": " 1"},
        {"adapter": "a"},
    ],
)
def test_separate_domains_have_different_names(other: dict[str, str]) -> None:
    assert not set(names(list(range(16)))) & set(names(list(range(16)), **other))


def test_no_salt_reaches_the_names_of_an_adapter() -> None:
    """A client chooses its salt, and might spell an adapter in it."""
    of_adapter = names(list(range(16)), adapter="a")
    for salt in ("@a", "a", "11:weights 1@a", "@a11:weights 1"):
        assert not set(of_adapter) & set(names(list(range(16)), salt=salt))
    assert not set(of_adapter) & set(names(list(range(16)), salt="a", adapter="b"))
