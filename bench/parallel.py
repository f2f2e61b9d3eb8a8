"""`python -m bench.parallel`: cost of the exchange between ranks of a stage, and their gain.

`--parts` selects from: exchanges, prefill, overlap.

`<ranks>_ranks_<bytes>_<route>_us`: every rank sends a part of this size and receives those of all.
The routes are the shared memory (`memory`), frames of the stage channel (`frames`), and gloo's
all-gather (`gloo`), which checks no digests. The figure is the longest of the ranks' medians; the
routes take turns.

`prefill_speedup`: a prompt of 512 tokens through a model of Qwen3-0.6B's shape, in one process on
one core and on two ranks with a core each, in turn.

`overlap_<link>_*`: eight prompts of 62 tokens on two ranks, whole and in two halves that alternate
(`--overlap-tokens`), and the wait for parts. Parts travel by `gloo`, or by memory with an added
delay, as on a link between hosts.
"""

import argparse
import multiprocessing
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count, islice, product
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from bench.command import benchmark_flags
from bench.engine_sides import MODEL
from bench.report import Value, render
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.layer_range import LayerRange, TensorRank
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.memory.heap import keep_freed_memory
from engine.pipeline.c10d import PointToPoint, TCPStore, Work, gloo_group
from engine.pipeline.channel import PacketKind, PartChannel, PartPiece
from engine.pipeline.frame_parts import MAX_PART_BYTES
from engine.pipeline.overlap import Overlap
from engine.pipeline.ranks import StageRanks
from engine.pipeline.stage_executor import StageExecutor
from models.loader import random_model
from pool.pipeline.part_memory import PartMemory, this_host
from pool.pipeline.stage_channel import FRAME_OVERHEAD, PoolChannel
from runtime.errors import BatonError
from tests.support.pool.formings import forming_of
from tests.support.pool.local_pool import build_executor
from transfer.ucx.settings import TransportProfile
from transfer.ucx.stage_channel import UcxStageChannel

MAX_BYTES = 64 << 20
TIMEOUT_S = 120.0
RANKS = (2, 4)
PART_BYTES = (1 << 10, 8 << 10, 32 << 10, 256 << 10, 2 << 20)
PROMPT_TOKENS, PAGE_SIZE = 512, 64
PROMPTS, SPLIT_FROM = 8, 497  # of 62 tokens each; with one token more they are split
WHOLE = (62,) * PROMPTS
SPLIT = (*WHOLE[:-1], 63)
DELAYS_S = {"0_ms": 0.0, "4_ms": 0.004, "10_ms": 0.01}  # by the name of the link
MOST_UNDER_WAY = 16  # operations of gloo
_SENT_AT = struct.Struct("<d")


class Question(NamedTuple):
    """Run that a rank is asked for: repeated exchanges of parts, or prompts if the size is 0.

    `link` selects the route of the parts; empty: through memory.
    """

    num_bytes: int = 0
    repeats: int = 1
    lengths: tuple[int, ...] = (PROMPT_TOKENS,)
    link: str = ""


class _AllGather(Protocol):
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work: ...


class _GlooParts:
    """`PartChannel` over gloo, whose own thread moves the bytes through the host's TCP.

    A piece is sent as a head and its bytes.
    """

    max_bytes = MAX_PART_BYTES

    def __init__(self, group: PointToPoint) -> None:
        self._group = group
        self._under_way: deque[tuple[Work, Tensor]] = deque(maxlen=MOST_UNDER_WAY)

    def begin(self, sequence: int) -> None:
        """Do nothing: no batch fails here, so that no piece is left over."""

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        head = torch.tensor([piece.kind, piece.sequence, piece.number, len(piece.data)])
        data = torch.frombuffer(bytearray(piece.data), dtype=torch.uint8)
        for rank, part in product(ranks, (head, data)):
            if len(self._under_way) == MOST_UNDER_WAY:
                self._under_way[0][0].wait(timedelta(seconds=timeout_s))
            self._under_way.append((self._group.send([part], rank, 0), part))

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        head = torch.empty(4, dtype=torch.int64)
        self._group.recv([head], rank, 0).wait()
        kind, sequence, number, num_bytes = head.tolist()
        data = into if len(into) == num_bytes else memoryview(bytearray(num_bytes))
        self._group.recv([torch.frombuffer(data, dtype=torch.uint8)], rank, 0).wait()
        return PartPiece(PacketKind(kind), sequence, number, data)

    def abandon(self) -> None:
        self._group.abort()


class _Link:
    """`PartChannel` that delays pieces by `delay_s` after sending, and sums the waits for them.

    Processes of a host share the monotonic clock.
    """

    def __init__(self, parts: PartChannel, delay_s: float = 0.0) -> None:
        self.waited_s, self._delay_s = 0.0, delay_s
        self.max_bytes = parts.max_bytes - _SENT_AT.size
        self._parts = parts
        self.begin, self.abandon = parts.begin, parts.abandon

    def send(self, ranks: Sequence[int], piece: PartPiece, *, timeout_s: float) -> None:
        data = bytearray(piece.data) + _SENT_AT.pack(time.monotonic())
        self._parts.send(ranks, piece._replace(data=data), timeout_s=timeout_s)

    def receive(self, rank: int, into: memoryview, *, timeout_s: float) -> PartPiece | None:
        began_s = time.monotonic()
        piece = self._parts.receive(rank, into, timeout_s=timeout_s)
        if piece is None:
            return None
        (sent_s,) = _SENT_AT.unpack_from(piece.data, len(piece.data) - _SENT_AT.size)
        time.sleep(max(0.0, sent_s + self._delay_s - time.monotonic()))
        self.waited_s += time.monotonic() - began_s
        return piece._replace(data=piece.data[: -_SENT_AT.size])


def serve_rank(rank: int, size: int, store_port: int, parent: Connection) -> None:
    """Run a rank in its own process: respond with median seconds until None arrives."""
    torch.set_num_threads(1)
    keep_freed_memory()
    frames = UcxStageChannel(
        rank=rank, max_frame_bytes=MAX_BYTES + FRAME_OVERHEAD, profile=TransportProfile.AUTO
    )
    memory = PartMemory(this_host(), rank=rank, size=size, check=frames.check)
    channel = PoolChannel(frames, rank=rank, max_bytes=MAX_BYTES, memory=memory, why="is on a CPU")
    parent.send(channel.address)
    channel.connect(parent.recv(), forming_of(1, size))
    overlap = Overlap(SPLIT_FROM)
    ranks = StageRanks(TensorRank(rank, size), while_under_way=overlap.pass_turn)
    by_frames = StageRanks(TensorRank(rank, size))
    by_frames.use(channel)
    store = TCPStore("127.0.0.1", store_port, is_master=rank == 0)
    group = gloo_group(store, rank, size, host="127.0.0.1", timeout_s=TIMEOUT_S)
    links = {
        "gloo": _Link(_GlooParts(group)),
        **{name: _Link(memory, delay_s) for name, delay_s in DELAYS_S.items()},
    }
    gloo = cast(_AllGather, group)
    routes: dict[str, Callable[[Tensor], object]] = {
        "memory": ranks.gather,
        "frames": by_frames.gather,
        "gloo": lambda part: gloo.allgather(
            [[torch.empty_like(part) for _ in range(size)]], [part]
        ).wait(),
    }
    executor: StageExecutor | None = None
    question: Question | None
    for sequence in count(1):
        question = parent.recv()
        if question is None:
            break
        link = links.get(question.link)
        ranks.use(channel, link or channel.parts)
        with ranks.step(sequence), by_frames.step(sequence):
            if question.num_bytes:
                part = torch.randn(
                    -(-question.num_bytes // 4096), min(1024, question.num_bytes // 4)
                )
                parent.send(
                    {
                        name: seconds(partial(route, part), question.repeats)
                        for name, route in routes.items()
                    }
                )
                continue
            executor = executor or executor_of(ranks, overlap)
            prefill(executor, question.lengths)
            began_s, waited_s = time.perf_counter(), 0.0 if link is None else link.waited_s
            prefill(executor, question.lengths)
            parent.send(
                {
                    "prefill": time.perf_counter() - began_s,
                    "waiting": 0.0 if link is None else link.waited_s - waited_s,
                }
            )
    channel.close()


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds; the first tenth of the calls is the warm-up."""
    times = []
    for _ in range(repeats + repeats // 10 + 1):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return median(times[repeats // 10 + 1 :])


def executor_of(ranks: StageRanks, overlap: Overlap) -> StageExecutor:
    """Return an executor of this rank's part of the model."""
    description = random_model(MODEL)
    return build_executor(
        description,
        LayerRange(0, description.facts.num_layers),
        page_size=PAGE_SIZE,
        num_pages=1 + PROMPT_TOKENS // PAGE_SIZE,
        num_slots=0,
        ranks=ranks,
        overlap=overlap,
    )[0]


def prefill(executor: StageExecutor, lengths: Sequence[int]) -> None:
    """Prefill prompts, with a page for every 64 tokens of each."""
    generator, pages, rows = torch.Generator().manual_seed(1), count(1), list[Row]()
    for length in lengths:
        tokens = torch.randint(
            executor.model.facts.vocab_size, (length,), generator=generator
        ).tolist()
        own = list(islice(pages, -(-length // PAGE_SIZE)))
        rows.append(
            Row(
                len(rows),
                tokens,
                0,
                own,
                0,
                SamplingRow(SamplingParams(temperature=0.0), position=length),
            )
        )
    executor.run(build_batch(ForwardMode.PREFILL, rows))


class RankGroup:
    """Context manager of several ranks, each a process; leaving it ends them."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pairs]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            context.Process(target=serve_rank, args=(rank, size, port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        addresses = [connection.recv() for connection in self._connections]
        for connection in self._connections:
            connection.send(addresses)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(TIMEOUT_S)

    def slowest(self, question: Question) -> dict[str, float]:
        """Return the seconds of the slowest rank, by purpose."""
        for connection in self._connections:
            connection.send(question)
        answers = [connection.recv() for connection in self._connections]
        return {name: max(answer[name] for answer in answers) for name in answers[0]}


def exchanges(flags: argparse.Namespace) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for size in RANKS:
        with RankGroup(size) as group:
            for num_bytes in PART_BYTES:
                repeats = max(10, min(flags.repeats, (flags.repeats << 15) // num_bytes))
                rounds = [group.slowest(Question(num_bytes, repeats)) for _ in range(flags.turns)]
                for name in rounds[0]:
                    values[f"{size}_ranks_{num_bytes}_{name}_us"] = 1e6 * median(
                        each[name] for each in rounds
                    )
    return values


def prefill_speedup(flags: argparse.Namespace) -> dict[str, Value]:
    with RankGroup(1) as alone, RankGroup(2) as pair:
        times = [
            (alone.slowest(Question())["prefill"], pair.slowest(Question())["prefill"])
            for _ in range(flags.turns)
        ]
    (one, least_one), (two, least_two) = (
        (1e3 * median(each), 1e3 * min(each)) for each in zip(*times, strict=True)
    )
    return {
        "prefill_1_rank_ms": one,
        "prefill_2_ranks_ms": two,
        "prefill_1_rank_least_ms": least_one,
        "prefill_2_ranks_least_ms": least_two,
        "prefill_speedup": median(one / two for one, two in times),
    }


def overlap_speedup(flags: argparse.Namespace) -> dict[str, Value]:
    values: dict[str, Value] = {}
    with RankGroup(2) as pair:
        for link in ("gloo", *DELAYS_S):
            turns = [
                [pair.slowest(Question(lengths=lengths, link=link)) for lengths in (WHOLE, SPLIT)]
                for _ in range(flags.turns)
            ]
            for name, answers in zip(("whole", "halves"), zip(*turns, strict=True), strict=True):
                for what, figure in (("prefill", "ms"), ("waiting", "waiting_ms")):
                    values[f"overlap_{link}_{name}_{figure}"] = 1e3 * median(
                        each[what] for each in answers
                    )
            values[f"overlap_{link}_speedup"] = median(
                whole["prefill"] / halves["prefill"] for whole, halves in turns
            )
    return values


PARTS = {"exchanges": exchanges, "prefill": prefill_speedup, "overlap": overlap_speedup}


def main() -> None:
    parser = benchmark_flags(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=300, help="repeats of an exchange per turn; default 300"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="parts to run; default %(default)s"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        values: dict[str, Value] = {}
        for part in arguments.parts.split(","):
            values.update(PARTS[part](arguments))
    except BatonError as error:
        sys.exit(f"bench.parallel: {error}")
    print(render("parallel", values, as_json=arguments.json))


if __name__ == "__main__":
    main()
