"""Several choices of one request: each is a request of its own to the workers, and all share one stream.

They begin together and fail together: the first error ends the others. Choice i draws with a seed derived from the
request's, so that every choice is repeatable alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from protos import generation_pb2, types_pb2
from router.request.answer import Emit, ResponseQueue
from router.request.flow import RequestFlow
from router.request.validate import AdmissibleRequest
from router.request.worker_stream import task_group

# 2^64 divided by the golden ratio: seeds of neighbouring requests do not meet (Knuth, TAOCP 3, section 6.4).
SEED_STRIDE = 0x9E3779B97F4A7C15


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`; that of choice 0 is the request's own."""
    return (seed + index * SEED_STRIDE) % 2**64


def choice_of(request: AdmissibleRequest, index: int) -> AdmissibleRequest:
    """Choice `index` as a request of its own. The prompt is scored for choice 0 only: it is the same for all."""
    if index == 0:
        return request
    engine = types_pb2.EngineRequest()
    engine.CopyFrom(request.engine)
    engine.request_id = f"{engine.request_id}/{index}"
    engine.sampling.seed = choice_seed(engine.sampling.seed, index)
    engine.ClearField("num_prompt_logprobs")
    return replace(request, engine=engine, resumed=request.resumed[index:index + 1],
                   resumed_from=request.resumed_from[index:index + 1])


def emit_into(responses: ResponseQueue, request_id: str, index: int) -> Emit:
    """Where a choice's flow puts its messages: under the client's id and the choice's index."""

    async def emit(response: generation_pb2.GenerateResponse) -> None:
        response.request_id, response.index = request_id, index
        await responses.put(response)

    return emit


async def run_together(flows: Sequence[RequestFlow]) -> None:
    """Every flow to its end. Raises the first BatonError, when the others have been cancelled."""
    async with task_group() as group:
        for flow in flows:
            group.create_task(flow.run())
