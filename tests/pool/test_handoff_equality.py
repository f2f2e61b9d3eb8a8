"""S4-9: a prompt computed on one split and continued on another gives the bits of one process that
did both.

Real models, pools and transfer agents. Pools start as NaN, so that anything that was not handed
over and is read shows.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardMode, SamplingRow
from engine.core.layer_range import LayerRange, get_pp_indices
from engine.core.request import SamplingParams
from engine.core.rows import Row, build_batch
from engine.pipeline.stage_executor import StageExecutor
from models.loader import ModelDescription
from runtime.clock import SystemClock
from testing.memory_transport import MemoryNetwork
from tests.support.models.tiny_models import GEMMA4, GLM_DSA, HYBRID, KIMI_LINEAR, LLAMA, tiny
from tests.support.pool.local_pool import build_executor
from tests.support.transfer.handoff import EventLog
from transfer.agent.agent import TransferAgent
from transfer.plan.copy_plan import plan_destination
from transfer.plan.handoff_terms import SourceTerms, StageSessionState
from transfer.transport.authenticator import new_key

PAGE_SIZE, NUM_PAGES, NUM_SLOTS, CHUNK_TOKENS, NUM_STEPS = 16, 14, 4, 64, 4
PROMPT = [random.Random(1).randrange(3, 256) for _ in range(70)]
SOURCE_PAGES, DEST_PAGES = (
    [3, 4, 5, 12, 1],
    [9, 2, 3, 4, 8, 13],
)  # the destination's last one is growth
SOURCE_SLOT, DEST_SLOT = 3, 1
MODELS = {"plain": LLAMA, "hybrid": HYBRID, "DSA": GLM_DSA, "windows": GEMMA4, "KDA": KIMI_LINEAR}


class Side:
    """The stages of one pool, called in turn, and their transfer agents."""

    def __init__(
        self,
        name: str,
        description: ModelDescription,
        partition: Sequence[LayerRange],
        network: MemoryNetwork,
        pages: list[int],
        slot_id: int,
    ) -> None:
        parts = [
            build_executor(
                description, layers, page_size=PAGE_SIZE, num_pages=NUM_PAGES, num_slots=NUM_SLOTS
            )
            for layers in partition
        ]
        self.stages: list[StageExecutor] = [executor for executor, _ in parts]
        self.log = [EventLog() for _ in parts]
        self.agents = [
            TransferAgent(
                memory=pools,
                transport=network.transport(SystemClock()),
                clock=SystemClock(),
                incarnation=f"{name}-{rank}",
                on_event=log,
            )
            for rank, ((_, pools), log) in enumerate(zip(parts, self.log, strict=True))
        ]
        self._pages, self._slot_id = pages, slot_id
        for agent in self.agents:
            agent.start()

    def forward(self, mode: ForwardMode, tokens: list[int], context_len: int) -> Tensor:
        """Return logits [1, vocab] after the last of `tokens`."""
        row = Row(
            1, tokens, context_len, self._pages, self._slot_id, SamplingRow(SamplingParams(), 0)
        )
        output: StageOutput | None = None
        for stage in self.stages:
            batch = build_batch(mode, [row])
            if output is not None:
                batch.token_ids = None
            output = stage.run(batch, output)
        assert output is not None
        assert output.logits is not None
        return output.logits

    def prefill(self) -> Tensor:
        for start in range(0, len(PROMPT), CHUNK_TOKENS):
            logits = self.forward(ForwardMode.PREFILL, PROMPT[start : start + CHUNK_TOKENS], start)
        return logits

    def decode(self, logits: Tensor) -> list[Tensor]:
        """Decode greedily from the prompt's logits on."""
        seen = [logits]
        for step in range(NUM_STEPS):
            seen.append(
                self.forward(ForwardMode.DECODE, [int(seen[-1].argmax())], len(PROMPT) + step)
            )
        return seen

    def wait(self, state: StageSessionState) -> None:
        for log in self.log:
            event = log.wait("s", state, StageSessionState.FAILED)
            assert event.state is state, event

    def shutdown(self) -> None:
        for agent in self.agents:
            assert agent.shutdown(60.0)


@contextmanager
def side(
    name: str,
    model: str,
    size: int,
    partition: str | None,
    network: MemoryNetwork,
    pages: list[int],
    slot_id: int,
) -> Iterator[Side]:
    description = described(model)
    stages = [
        get_pp_indices(description.facts.num_layers, rank, size, partition) for rank in range(size)
    ]
    made = Side(name, description, stages, network, pages, slot_id)
    try:
        yield made
    finally:
        made.shutdown()


@cache
def described(model: str) -> ModelDescription:
    torch.set_num_threads(1)
    return tiny(MODELS[model])


@cache
def reference(model: str) -> list[Tensor]:
    """Compute the output in one process and one stage, without a handoff."""
    with side("alone", model, 1, None, MemoryNetwork(), DEST_PAGES, DEST_SLOT) as alone:
        return alone.decode(alone.prefill())


def hand_over(model: str, source: Side, dest: Side) -> None:
    specs = described(model).cache_specs(PAGE_SIZE)
    terms = SourceTerms(
        "c",
        "text",
        PAGE_SIZE,
        len(PROMPT),
        CHUNK_TOKENS,
        tuple(SOURCE_PAGES),
        SOURCE_SLOT,
        tuple(agent.endpoint for agent in source.agents),
    )
    destination = plan_destination(
        terms,
        session_id="s",
        epoch=0,
        tag_base=1 << 32,
        key=new_key(),
        page_ids=DEST_PAGES[: len(SOURCE_PAGES)],
        slot_id=DEST_SLOT,
        stages=[agent.endpoint for agent in dest.agents],
        specs=specs,
    )
    for agent in dest.agents:
        agent.open_receive(terms, destination)
    dest.wait(StageSessionState.OPEN)
    for agent in source.agents:
        agent.expect_send(1, len(PROMPT))
        agent.open_send(1, terms, destination)
        for layer_id in agent.endpoint.layers:
            agent.layer_done(1, layer_id, len(PROMPT))
    dest.wait(StageSessionState.COMPLETE)


@pytest.mark.parametrize(
    ("prefill_pp", "decode_pp", "prefill_partition", "decode_partition"),
    [
        *((*sizes, None, None) for sizes in product(range(1, 5), repeat=2)),
        (2, 3, "4,1", "1,3,1"),
        (3, 2, "1,3,1", "1,4"),
    ],
)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("windows", "KDA")))
        for name in MODELS
    ],
)
def test_s4_9_every_split_continues_with_the_same_bits(
    model: str,
    prefill_pp: int,
    decode_pp: int,
    prefill_partition: str | None,
    decode_partition: str | None,
) -> None:
    network = MemoryNetwork()
    with (
        side(
            "prefill", model, prefill_pp, prefill_partition, network, SOURCE_PAGES, SOURCE_SLOT
        ) as source,
        side("decode", model, decode_pp, decode_partition, network, DEST_PAGES, DEST_SLOT) as dest,
    ):
        prompt_end = source.prefill()
        hand_over(model, source, dest)
        for ours, expected in zip(dest.decode(prompt_end), reference(model), strict=True):
            assert torch.equal(ours, expected)
