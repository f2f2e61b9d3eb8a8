"""A subscriber's view after any events equals the workers' cached blocks of prompts that this
router placed."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as pb

from protos import worker_pb2
from router.api import kv_events
from router.api.kv_events import CacheEvents, Subscription
from router.api.vllm_events import batch_to_proto
from router.workers.prefix_index import PrefixIndex, RoutedPrompt
from runtime.digests import block_names

PAGE = 2


class Gateway:
    """A subscriber: the tokens of whole prompts, from their first block on, by the hash of the last
    one."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.numbers: list[int] = []

    async def read(self) -> None:
        if not self._subscription._has_news.is_set():
            return
        for batch in map(batch_to_proto, await self._subscription.news()):
            self.numbers.append(batch.sequence_number)
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: pb.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.prompts.clear()
        for key in event.removed.block_hashes:
            del self.prompts[key]
        before = (
            self.prompts[event.stored.parent_block_hash]
            if event.stored.HasField("parent_block_hash")
            else ()
        )
        for block in event.stored.blocks:
            assert block.block_size == len(block.token_ids) == PAGE
            before = (*before, *block.token_ids)
            assert block.block_hash not in self.prompts
            self.prompts[block.block_hash] = before


class Cluster:
    """An index of workers whose events are followed."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.listener = self.events = CacheEvents(self.index.is_held)
        self._num_reports: dict[str, int] = {}

    def place(self, *token_ids: int, salt: str = "", adapter: str = "") -> None:
        self.events.placed(RoutedPrompt(token_ids, salt, adapter=adapter), PAGE, "m")

    def report(
        self, worker: str, stored: tuple[bytes, ...] = (), removed: tuple[bytes, ...] = ()
    ) -> None:
        number = self._num_reports.get(worker, 0)
        self._num_reports[worker] = number + 1
        assert self.index.report(
            worker,
            worker_pb2.CacheReport(
                number=number, whole=not number, stored=b"".join(stored), removed=b"".join(removed)
            ),
        )


def names(*token_ids: int) -> tuple[bytes, ...]:
    return block_names(token_ids, PAGE, compatibility="m")


async def test_a_block_is_published_with_its_whole_prefix_and_removed_with_it() -> None:
    cluster = Cluster()
    with cluster.events.subscribe(last_number=7) as subscription:
        gateway = Gateway(subscription)
        cluster.place(1, 2, 3, 4, 5, 6, 7)
        cluster.report("h:1", stored=names(1, 2, 3, 4, 5, 6)[2:])  # as a model with states does
        await gateway.read()
        assert sorted(gateway.prompts.values()) == [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)]
        cluster.report("h:2", stored=names(1, 2)[:1])
        cluster.index.forget("h:1")
        await gateway.read()
        assert list(gateway.prompts.values()) == [(1, 2)]
        cluster.report("h:2", removed=names(1, 2)[:1])
        await gateway.read()
        assert gateway.prompts == {}
        assert gateway.numbers == [8, 9, 10]


async def test_earlier_blocks_are_published_once_tokens_are_known_salted_never() -> None:
    cluster = Cluster()
    cluster.report("h:1", stored=names(1, 2, 3, 4))
    with cluster.events.subscribe() as subscription:
        gateway = Gateway(subscription)
        cluster.place(1, 2, 3, 4, 5, salt="own")
        await gateway.read()
        assert gateway.prompts == {}
        cluster.place(1, 2, 9, 9, 9)
        await gateway.read()
        assert list(gateway.prompts.values()) == [(1, 2)]


async def test_a_subscriber_sees_the_blocks_of_its_adapter() -> None:
    """The same tokens with an adapter are other blocks, which its gateway must not take for its own."""
    cluster = Cluster()
    with_adapter = block_names((1, 2, 3, 4), PAGE, compatibility="m", adapter="a@1")
    with (
        cluster.events.subscribe(adapter="") as plain,
        cluster.events.subscribe(adapter="a") as adapted,
        cluster.events.subscribe() as whole,
    ):
        gateways = [Gateway(each) for each in (plain, adapted, whole)]
        for gateway in gateways:
            await gateway.read()
        cluster.place(1, 2, 3, 4, 5)
        cluster.place(1, 2, 3, 4, 5, adapter="a@1")
        cluster.report("h:1", stored=(*names(1, 2)[:1], *with_adapter))
        for gateway in gateways:
            await gateway.read()
        assert [len(gateway.prompts) for gateway in gateways] == [1, 2, 3]
        with cluster.events.subscribe(adapter="a") as late:
            gateway = Gateway(late)
            await gateway.read()
            assert gateway.prompts == gateways[1].prompts
        cluster.report("h:1", removed=with_adapter)
        for gateway in gateways:
            await gateway.read()
        assert [len(gateway.prompts) for gateway in gateways] == [1, 0, 1]


@pytest.mark.parametrize("max_blocks", [5, 1000])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
async def test_any_order(max_blocks: int, data: st.DataObject) -> None:
    """Placing, storing and removing in any order, with subscribers that come late and fall
    behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "MAX_BLOCKS", max_blocks)
        patch.setattr(kv_events, "MAX_EVENTS", 3)
        patch.setattr(kv_events, "CHUNK_BLOCKS", 2)
        cluster, held = Cluster(), set[bytes]()
        every = {
            names(*prompt)[-1]: prompt
            for a in (1, 2)
            for b in (3, 4)
            for c in (5, 6)
            for prompt in ((a, a), (a, a, b, b), (a, a, b, b, c, c))
        }
        placed = set[tuple[int, ...]]()
        with cluster.events.subscribe() as first, cluster.events.subscribe() as second:
            gateways = [Gateway(first), Gateway(second)]
            for _ in range(data.draw(st.integers(0, 20))):
                name = data.draw(st.sampled_from(sorted(every)))
                match data.draw(st.sampled_from(["place", "store", "remove", "read"])):
                    case "place":
                        cluster.place(*every[name], 0)
                        placed |= {
                            every[name][:end] for end in range(PAGE, len(every[name]) + 1, PAGE)
                        }
                    case "store":
                        cluster.report("h:1", stored=(name,))
                        held.add(name)
                    case "remove":
                        cluster.report("h:1", removed=(name,))
                        held.discard(name)
                    case "read":
                        await gateways[0].read()
            for gateway in gateways:
                await gateway.read()
                assert all(after == before + 1 for before, after in pairwise(gateway.numbers))
            points = {every[name] for name in held} & placed
            expected = {
                point[:end] for point in points for end in range(PAGE, len(point) + 1, PAGE)
            }
            seen = [set(gateway.prompts.values()) for gateway in gateways]
            assert seen[0] == seen[1]
            assert seen[0] == expected if max_blocks > len(every) else seen[0] <= expected
