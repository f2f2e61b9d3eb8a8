"""Tells a sending stage's transfer agent which layers are done: the batch says whose tokens passed."""

from engine.batch import ForwardBatch, ForwardMode
from engine.pipeline.executor import LayerObserver
from transfer.agent import TransferAgent


def layer_observer(agent: TransferAgent) -> LayerObserver:
    """For prefill stages. A row with nothing cached yet begins a request, also on stages that hear of it only so."""

    def observe(batch: ForwardBatch, layer_id: int) -> None:
        if batch.mode is not ForwardMode.PREFILL:
            return
        for key, context_len, query_len in zip(batch.request_ids, batch.context_lens, batch.query_lens, strict=True):
            if context_len == 0:
                agent.expect_send(key)
            agent.layer_done(key, layer_id, context_len + query_len)

    return observe
