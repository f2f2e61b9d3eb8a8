"""Tells a sending stage's transfer agent which layers are done: the batch says whose tokens passed."""

from collections.abc import Callable

from engine.core.batch import ForwardBatch, ForwardMode
from engine.pipeline.executor import LayerObserver
from transfer.agent.agent import TransferAgent
from transfer.agent.readiness import DeviceEvent

LayerMark = Callable[[], DeviceEvent]
"""Records an event behind the work that was given to the device so far."""


def layer_observer(agent: TransferAgent, mark: LayerMark | None = None) -> LayerObserver:
    """For prefill stages. A row with nothing cached yet begins a request, also on stages that hear of it only so.

    On a device a layer that was launched is not done: then `mark` is given, and the agent waits for its event, one per
    batch and layer.
    """

    def observe(batch: ForwardBatch, layer_id: int) -> None:
        if batch.mode is not ForwardMode.PREFILL:
            return
        event = None if mark is None else mark()
        for key, context_len, query_len in zip(batch.request_keys, batch.context_lens, batch.query_lens, strict=True):
            if context_len == 0:
                agent.expect_send(key)
            agent.layer_done(key, layer_id, context_len + query_len, after=event)

    return observe
