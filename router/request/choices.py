"""The choices of a request.

Each choice is a separate request to the workers, and all choices share one stream. They begin
together and fail together: the first error ends the others. Choice i samples with a seed derived
from the request's, so that every choice can be reproduced alone.
"""

from collections.abc import Sequence
from dataclasses import replace

from protos import types_pb2
from router.request.flow import RequestFlow
from router.request.validate import AdmissibleRequest
from runtime.process.supervision import task_group

# 2^64 divided by the golden ratio, so that seeds of neighboring requests do not collide (Knuth,
# TAOCP 3, section 6.4).
SEED_STRIDE = 0x9E3779B97F4A7C15


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`; choice 0 has the request's own."""
    return (seed + index * SEED_STRIDE) % 2**64


def choice_of(request: AdmissibleRequest, index: int) -> AdmissibleRequest:
    """Return choice `index` as a separate request. Only choice 0 scores the common prompt."""
    if index == 0:
        return request
    engine = types_pb2.EngineRequest()
    engine.CopyFrom(request.engine)
    engine.request_id = f"{engine.request_id}/{index}"
    engine.sampling.seed = choice_seed(engine.sampling.seed, index)
    engine.ClearField("num_prompt_logprobs")
    return replace(
        request,
        engine=engine,
        resumed=request.resumed[index : index + 1],
        resumed_from=request.resumed_from[index : index + 1],
    )


async def run_together(flows: Sequence[RequestFlow]) -> None:
    """Run every flow to its end; raise the first BatonError after the others were cancelled."""
    async with task_group() as group:
        for flow in flows:
            group.create_task(flow.run())
