"""Objects in host memory: their limit, and which of them make room."""

import random

import pytest

from engine.core.layer_range import LayerRange, TensorRank
from pool.tiers.block_store import Content, ObjectKey, StagePart
from pool.tiers.memory_store import MemoryStore

PART = StagePart(LayerRange(0, 2), TensorRank())
SIZE = 10


def key(number: int, content: Content = Content.PAGE) -> ObjectKey:
    return ObjectKey(number.to_bytes(16, "little"), content, PART)


def put(store: MemoryStore, number: int) -> bool:
    return store.put(key(number), (memoryview(b"one"), memoryview(b"and two")))


def held(store: MemoryStore, count: int = 20) -> list[int]:
    blocks = [key(number).block for number in range(count)]
    return [
        number
        for number, parts in enumerate(store.parts(blocks, Content.PAGE))
        if list(parts) == [PART]
    ]


def test_an_object_is_read_as_it_was_stored() -> None:
    store = MemoryStore(5 * SIZE)
    assert put(store, 1)
    pieces = (memoryview(bytearray(4)), memoryview(bytearray(6)))
    assert store.get(key(1), pieces) == SIZE
    assert b"".join(pieces) == b"oneand two"
    assert store.get(key(1), ()) == SIZE
    assert store.get(key(1, Content.STATE), pieces) is None
    assert store.put(key(1), ())
    assert (store.get(key(1), ()), store.num_bytes) == (0, 0)


def test_objects_that_were_not_used_for_longest_make_room() -> None:
    store = MemoryStore(5 * SIZE + 3)
    for number in range(5):
        assert put(store, number)
    store.use([key(1), key(0), key(19)])
    for number in (5, 6, 7):
        assert put(store, number)
    assert held(store) == [0, 1, 5, 6, 7]
    assert put(store, 1), "what is replaced makes room first"
    assert held(store) == [0, 1, 5, 6, 7]
    assert store.num_bytes == 5 * SIZE


@pytest.mark.parametrize("limit", [0, SIZE - 1])
def test_an_object_larger_than_the_limit_is_not_stored(limit: int) -> None:
    store = MemoryStore(limit)
    assert not put(store, 1)
    assert (held(store), store.num_bytes) == ([], 0)


def test_the_limit_holds_through_any_history() -> None:
    dice = random.Random(4)
    store = MemoryStore(100)
    sizes = dict[int, int]()
    for _ in range(5000):
        number, size = dice.randrange(20), dice.randrange(40)
        match dice.randrange(4):
            case 0 | 1:
                assert store.put(key(number), (memoryview(bytes(size)),))
                sizes[number] = size
            case 2:
                store.use([key(number)])
            case _:
                store.remove(key(number))
        there = held(store)
        assert store.num_bytes == sum(sizes[number] for number in there) <= 100
        assert all(store.get(key(number), ()) == sizes[number] for number in there)
    store.close()
    assert (held(store), store.num_bytes) == ([], 0)
