"""Client of `vllm.grpc.engine.VllmEngine` servers for load generation: token ids in, token ids out.

Its stubs are the package `smg-grpc-proto` (extra `vllm`).
"""

import contextlib
from collections.abc import AsyncGenerator
from types import ModuleType, TracebackType
from typing import Any, Self

import grpc

from baton.values import Chunk, Event, Finish, FinishReason, ModelInfo, Query, Timings, Usage
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError
from runtime.rpc.client import open_channel
from runtime.rpc.status import error_from_rpc
from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity

CONTROL_TIMEOUT_S = 10.0
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def _stubs() -> tuple[ModuleType, ModuleType]:
    """Return the modules of the stubs, or raise ConfigError if they are not installed."""
    try:
        from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
    except ImportError as error:
        raise ConfigError(
            "the VllmEngine client needs the package smg-grpc-proto: pip install 'baton[vllm]'",
            field="api",
        ) from error
    return vllm_engine_pb2, vllm_engine_pb2_grpc


class AsyncVllmEngineClient:
    """Client that implements `baton.load_run.Endpoint`; create it inside the running loop."""

    def __init__(self, target: str, *, security: ChannelSecurity = PLAIN_CHANNEL) -> None:
        self._pb, stub = _stubs()
        self._channel = open_channel(target, security=security)
        self._stub: Any = stub.VllmEngineStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def model_info(self) -> ModelInfo:
        try:
            info = await self._stub.GetModelInfo(
                self._pb.GetModelInfoRequest(), timeout=CONTROL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return ModelInfo(
            model=info.served_model_name,
            architecture=", ".join(info.architectures),
            vocab_size=info.vocab_size,
            max_context_tokens=info.max_context_length or info.max_req_input_len + 1,
            num_layers=0,
            eos_token_ids=tuple(info.eos_token_ids),
            has_tokenizer=bool(info.tokenizer_path),
            has_chat_template=False,
            revision="",
        )

    async def generate(
        self, query: Query, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield chunks, then one Finish, without text or timings.

        Raises:
            InvalidRequestError: the prompt is not a list of token ids.
        """
        metadata = (("baton-session-id", query.session_id),) if query.session_id else ()
        call = self._stub.Generate(self._request(query), timeout=timeout_s, metadata=metadata)
        with contextlib.ExitStack() as stack:
            stack.callback(call.cancel)
            try:
                async for response in call:
                    yield self._event(query.request_id, response)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None

    def _request(self, query: Query) -> Any:  # noqa: ANN401 - a message of stubs that may not be installed
        ids = [item for item in query.prompt if isinstance(item, int)]
        if isinstance(query.prompt, str) or len(ids) != len(query.prompt):
            raise InvalidRequestError(
                FieldViolation("prompt", "must be token ids for a VllmEngine server")
            )
        sampling = query.sampling
        stop = query.stop
        seed = None if sampling.seed is None else sampling.seed % (1 << 31)
        params = self._pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            top_k=sampling.top_k or 0,
            repetition_penalty=1.0,
            max_tokens=stop.max_tokens,
            stop_token_ids=stop.token_ids,
            ignore_eos=bool(stop.ignore_eos),
            n=1,
            seed=seed,
        )
        return self._pb.GenerateRequest(
            request_id=query.request_id,
            stream=True,
            sampling_params=params,
            tokenized=self._pb.TokenizedInput(input_ids=ids),
        )

    def _event(self, request_id: str, response: Any) -> Event:  # noqa: ANN401
        answer = (
            response.complete if response.WhichOneof("response") == "complete" else response.chunk
        )
        usage = Usage(answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
        if response.WhichOneof("response") == "chunk":
            return Chunk(request_id, tuple(answer.token_ids), "", (), usage)
        reason = _REASONS.get(answer.finish_reason, FinishReason.ABORTED)
        return Finish(request_id, reason, None, None, usage, Timings())
