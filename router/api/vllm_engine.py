"""`vllm.grpc.engine.VllmEngine`: the contract between gateways and vLLM, served by this router.

Every request is served as by `baton.v1.Generation`; only the messages differ
(`router.api.vllm_translate`). Methods that Baton does not have are rejected with UNIMPLEMENTED,
fields as bad requests, both by name. A gateway gets a tokenizer whose ids carry texts and
conversations to the router (`router.text.carrier`), which renders and tokenizes them.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from protos import generation_pb2 as pb
from router.api.generation import GenerationService
from router.api.kv_events import CacheEvents
from router.api.vllm_events import batch_to_proto, load_to_proto
from router.api.vllm_tokenizer import GatewayTokenizer
from router.api.vllm_translate import VllmAnswer, error_for_vllm, request_from_vllm
from router.text.tokenizer import INLINE_CHARACTERS
from runtime.errors import FieldViolation, InvalidRequestError, UnsupportedError
from runtime.model_files.config import read_config, text_fields
from runtime.version import VERSION

Context = grpc.aio.ServicerContext[Any, Any]
TOKENIZER_CHUNK_BYTES = 1 << 20
LOAD_INTERVAL_S = 1.0  # between two messages with the load, if there are no events


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # published without types
    """Service in front of `generation`, sharing its requests."""

    def __init__(
        self,
        generation: GenerationService,
        model_dir: Path,
        tokenizer: GatewayTokenizer | None,
        events: CacheEvents,
        adapter: str = "",
    ) -> None:
        """`tokenizer` is served to gateways; None for a model without one.

        Every request has the adapter, if there is one, and the model's name names it.
        """
        self._adapter = adapter
        self._generation = generation
        self._tokenizer = tokenizer
        self._carrier = None if tokenizer is None else tokenizer.carrier
        self._events = events
        self._model_dir = model_dir.absolute()  # gateways look up relative names on a model hub
        self._started_s = time.monotonic()
        self._last_received_s = 0.0
        self._zipping = asyncio.Lock()
        self._zipped: tuple[bytes, str] | None = None

    def with_adapter(self, adapter: str) -> "VllmEngineService":
        """Return the service for an adapter, in front of the same requests."""
        return VllmEngineService(
            self._generation, self._model_dir, self._tokenizer, self._events, adapter
        )

    async def Generate(
        self, request: vllm.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm.GenerateResponse]:
        self._last_received_s = time.time()
        try:
            wanted = request_from_vllm(request, await self._carried(request))
            wanted.model = self._adapter and f":{self._adapter}"
            answer = VllmAnswer(request, None if self._carrier is None else self._carrier.bytes_of)
            async with contextlib.aclosing(self._generation.Generate(wanted, context)) as responses:
                async for response in responses:
                    for ours in answer.add(response):
                        yield ours
        except InvalidRequestError as error:
            raise error_for_vllm(error) from None

    async def _carried(self, request: vllm.GenerateRequest) -> str | None:
        """Return the text that a request's token ids carry, if they carry one."""
        if self._carrier is None:
            return None
        token_ids = request.tokenized.input_ids
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._carrier.text_of(token_ids)
        return await asyncio.to_thread(self._carrier.text_of, token_ids)

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        await self._generation.Abort(pb.AbortRequest(request_ids=request.request_ids), context)
        return vllm.AbortResponse()

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        problem = self._generation.problem()
        if not problem and self._adapter:
            info = await self._generation.GetModelInfo(pb.GetModelInfoRequest(), context)
            if self._adapter not in info.adapters:
                problem = f"no worker has the adapter {self._adapter}"
        return vllm.HealthCheckResponse(healthy=not problem, message=problem or "serving")

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        info = await self._generation.GetModelInfo(pb.GetModelInfoRequest(), context)
        config = read_config(self._model_dir)
        fields = text_fields(config)
        sampling = self._generation.default_sampling
        return vllm.GetModelInfoResponse(
            model_path=str(self._model_dir),
            is_generation=True,
            # Ids that carry a conversation outnumber its tokens, so only the router can tell
            # whether it is too long.
            max_context_length=info.max_context_tokens if self._carrier is None else 0,
            vocab_size=info.vocab_size,
            served_model_name=f"{info.model}:{self._adapter}" if self._adapter else info.model,
            tokenizer_path="" if self._tokenizer is None else self._tokenizer.folder,
            model_type=config.get("model_type", ""),
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            pad_token_id=fields.get("pad_token_id") or 0,
            bos_token_id=fields.get("bos_token_id") or 0,
            max_req_input_len=info.max_context_tokens - 1,
            default_sampling_params_json=json.dumps(dict(sampling)) if sampling else "",
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        load = await self._generation.GetLoad(pb.GetLoadRequest(), context)
        return vllm.GetServerInfoResponse(
            active_requests=self._generation.num_active,
            server_type="vllm-grpc",
            last_receive_timestamp=self._last_received_s,
            uptime_seconds=time.monotonic() - self._started_s,
            data_parallel_size=1,
            max_num_seqs=load.max_running_requests,
            block_size=load.page_size,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        if request.dp_rank:
            raise UnsupportedError(FieldViolation("dp_rank", "there is one rank, 0"))
        load = await self._generation.GetLoad(pb.GetLoadRequest(), context)
        waiting = load.waiting_requests + load.queued_requests
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[
                vllm.SchedulerLoad(
                    num_running_reqs=load.running_requests,
                    num_waiting_reqs=waiting,
                    num_total_reqs=load.running_requests + waiting,
                    num_used_tokens=load.kv_tokens_used,
                    max_total_num_tokens=load.kv_tokens_total,
                    token_usage=load.kv_utilization,
                    utilization=load.utilization,
                    max_running_requests=load.max_running_requests,
                    num_waiting_uncached_tokens=load.queued_tokens,
                )
            ],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        data, digest = await self._archive()
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            is_last = start + TOKENIZER_CHUNK_BYTES >= len(data)
            yield common_pb2.GetTokenizerChunk(
                data=data[start : start + TOKENIZER_CHUNK_BYTES], sha256=digest if is_last else ""
            )

    async def _archive(self) -> tuple[bytes, str]:
        """Return the tokenizer's archive and its digest.

        Built once, on a thread: it may have tens of megabytes.

        Raises:
            UnsupportedError: the model has no tokenizer.
        """
        async with self._zipping:
            if self._zipped is None:
                if self._tokenizer is None:
                    _refuse("GetTokenizer", "the model has no tokenizer")
                self._zipped = await asyncio.to_thread(self._tokenizer.zipped)
            return self._zipped

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        last_number = request.start_sequence_number
        with self._events.subscribe(last_number, self._adapter) as subscription:
            for sample in itertools.count():
                batches = await subscription.news(LOAD_INTERVAL_S)
                load = load_to_proto(self._generation.load(), sample)
                for batch in batches:
                    yield batch_to_proto(batch, load)
                if not batches:
                    load.load_only = True
                    number = subscription.last_number
                    yield common_pb2.KvEventBatch(sequence_number=number, load=load)

    async def Embed(self, request: Message, context: Context) -> vllm.EmbedResponse:
        """Reject the call as a bad request: gateways turn UNIMPLEMENTED into a server error, which
        clients retry.
        """
        raise InvalidRequestError(
            FieldViolation("model", "generates text, and has neither embeddings nor classes")
        )

    async def FlushCache(self, request: Message, context: Context) -> common_pb2.FlushCacheResponse:
        """Flush the caches at once; pages in use by running requests are kept."""
        flushed = (await self._generation.FlushCaches(pb.FlushCachesRequest(), context)).workers
        failed = [f"{each.role} {each.address}: {each.error}" for each in flushed if each.error]
        return common_pb2.FlushCacheResponse(
            success=not failed,
            message="; ".join(failed) or f"{sum(each.pages for each in flushed)} pages released",
        )

    async def StartProfile(self, request: Message, context: Context) -> common_pb2.ProfileResponse:
        _refuse("StartProfile", "there is no profiler to control")

    async def StopProfile(self, request: Message, context: Context) -> common_pb2.ProfileResponse:
        _refuse("StopProfile", "there is no profiler to control")


def _refuse(method: str, reason: str) -> NoReturn:
    raise UnsupportedError(FieldViolation(method, f"is not offered: {reason}"))
