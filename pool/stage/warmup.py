"""Warm-up of a pool before it serves: every kind of batch on stages that compile kernels on first
use, then one internal request through all stages.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.contracts.model import ModelFacts, StageOutput
from engine.core.batch import ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.rows import Row, build_batch
from engine.loop import EngineLoop
from engine.memory.layout import NULL_INDEX
from engine.pipeline.stage_executor import StageExecutor
from runtime.errors import BatonError, DeadlineError

EventT = TypeVar("EventT")

WARM_UP_TIMEOUT_S = 60.0


def run_every_kind(
    executor: StageExecutor, facts: ModelFacts, *, capture_layers: frozenset[int], max_nodes: int
) -> None:
    """Run one row of each kind of batch over the null records.

    Compiling takes minutes at worst. A stage that compiled in the middle of a step would appear
    dead to the others. `max_nodes` bounds the nodes of verified trees; 0 without speculation.
    """
    kinds = [(ForwardMode.PREFILL, SpecRow()), (ForwardMode.DECODE, SpecRow())]
    if max_nodes:
        kinds.append((ForwardMode.VERIFY, SpecRow((-1,))))
    if max_nodes > 2:
        kinds.append((ForwardMode.VERIFY, SpecRow((-1, 0, 0))))
    for mode, spec in kinds:
        count = max(1, len(spec.parents))
        batch = build_batch(
            mode,
            [Row(0, [0] * count, 0, [NULL_INDEX], NULL_INDEX, None, spec if max_nodes else None)],
        )
        hidden = torch.zeros(count, facts.hidden_size, dtype=getattr(torch, facts.dtype))
        executor.run(
            batch, StageOutput(hidden=hidden, aux_hidden=dict.fromkeys(capture_layers, hidden))
        )


async def run_inside(
    loop: EngineLoop,
    submit: Callable[[Callable[[EventT], object]], int],
    outcome: Callable[[EventT], bool | BatonError],
    end: Callable[[int], object],
) -> None:
    """Submit a request on the loop's thread and wait for the event whose `outcome` is not False.

    `end(key)` releases the request's memory exactly once, in every case, on the event loop's
    thread.

    Raises:
        BatonError: the error that `outcome` returned.
        DeadlineError: no such event arrived in time.
    """
    events = asyncio.get_running_loop()
    done: asyncio.Future[None] = events.create_future()

    def settle(event: EventT) -> None:
        result = outcome(event)
        if done.done() or result is False:
            return
        if isinstance(result, BatonError):
            done.set_exception(result)
        else:
            done.set_result(None)

    key = await loop.submit(
        lambda: submit(lambda event: events.call_soon_threadsafe(settle, event)),
        undo=lambda taken: events.call_soon_threadsafe(end, taken),
    )
    try:
        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            await done
    except TimeoutError:
        raise DeadlineError(
            f"the warm-up token did not arrive within {WARM_UP_TIMEOUT_S:g} s"
        ) from None
    finally:
        end(key)
