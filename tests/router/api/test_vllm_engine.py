"""The vLLM contract without a router behind it: what is refused before any work, and what is made once."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from router.api import vllm_engine
from router.api.kv_events import CacheEvents
from router.api.vllm_engine import VllmEngineService
from router.api.vllm_translate import request_from_vllm
from runtime.errors import InvalidRequestError
from tests.router.harness import EOS, FACTS, running_router, served_model, write_model_dir


def test_many_biases_are_refused_before_each_is_looked_at() -> None:
    request = vllm.GenerateRequest()
    request.sampling_params.logit_bias.update(dict.fromkeys(range(-1, 1024), 1.0))
    with pytest.raises(InvalidRequestError, match="1025 entries, the limit is 1024") as caught:
        request_from_vllm(request)
    assert caught.value.violations[0].field == "sampling_params.logit_bias"


async def test_the_tokenizer_is_packed_once_and_off_the_event_loop(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    threads, pack = [], vllm_engine._zipped

    def watched(folder: Path) -> tuple[bytes, str]:
        threads.append(threading.current_thread())
        return pack(folder)

    monkeypatch.setattr(vllm_engine, "_zipped", watched)
    nobody: Any = None
    service = VllmEngineService(nobody, write_model_dir(tmp_path), CacheEvents(lambda name: False))

    async def read() -> bytes:
        return b"".join([part.data async for part in service.GetTokenizer(common_pb2.GetTokenizerRequest(), nobody)])

    first, second = await asyncio.gather(read(), read())
    assert first == second == await read() != b""
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("given", [{}, {"top_p": 0.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 0.0}])
def test_what_is_absent_there_is_not_the_models_default(given: dict[str, float]) -> None:
    """A gateway has put those in itself, and its zero is also what a client's "all tokens" looks like."""
    wanted = request_from_vllm(vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**given))).sampling
    assert (wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p, wanted.repetition_penalty) == (1, 1, 0, 0, 1)
    assert all(wanted.HasField(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))


@pytest.mark.parametrize(("sampling", "expected"), [
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, '{"temperature": 0.6, "top_k": 20, "top_p": 0.95}'),
    ({}, "")])
async def test_gateways_are_told_of_the_models_sampling_and_end_tokens(
        sampling: dict[str, float], expected: str, tmp_path: Path) -> None:
    model = replace(served_model(), facts=replace(FACTS, sampling=sampling))
    nothing: Any = None
    async with running_router(model=model) as router:
        service = VllmEngineService(router.service, write_model_dir(tmp_path), CacheEvents(lambda name: False))
        told = await service.GetModelInfo(vllm.GetModelInfoRequest(), nothing)
    assert told.default_sampling_params_json == expected
    assert list(told.eos_token_ids) == [EOS]
