"""An engine that records its prompts, with the router's own code for gateways."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
from prometheus_client import CollectorRegistry
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from protos import generation_pb2 as pb
from protos import types_pb2
from router.api.generation import GenerationService
from router.api.kv_events import CacheEvents
from router.api.vllm_engine import VllmEngineService
from router.api.vllm_tokenizer import gateway_tokenizer
from router.request.validate import admissible
from router.text.control_tokens import UserControlTokens
from router.text.model_facts import load_served_model
from router.text.tokenizer import TextTokenizer
from runtime.observe.metrics.calls import RpcMetrics
from runtime.rpc.server import GrpcServer, ServerOptions

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"
CONTEXT_TOKENS = 1 << 16
Context = grpc.aio.ServicerContext[Any, Any]


def write_text_model(
    folder: Path, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str]
) -> Path:
    """Write the files of a checkpoint that a router reads, with this tokenizer and chat
    template."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Tiny"],
        "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens))
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Recorder:
    """A replacement of `GenerationService`: it checks and parses requests like it, keeps their
    prompts, and returns `token_ids`, one per message."""

    def __init__(
        self, folder: Path, user_control_tokens: UserControlTokens = UserControlTokens.TOKENS
    ) -> None:
        """Serve the model in this folder, under the folder's name."""
        self.folder = folder
        self.model = load_served_model(folder, user_control_tokens=user_control_tokens)
        self.prompts: list[list[int]] = []
        self.requests: list[pb.GenerateRequest] = []
        self.token_ids: tuple[int, ...] = (1,)
        self.default_sampling: Mapping[str, float] = {}
        self.num_active = 0

    @property
    def text_tokenizer(self) -> TextTokenizer:
        assert self.model.text_tokenizer is not None
        return self.model.text_tokenizer

    def problem(self) -> str:
        return ""

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        facts = self.model.facts
        return pb.GetModelInfoResponse(
            model=facts.name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_context_tokens=facts.max_context_tokens,
            has_tokenizer=True,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse()

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse()

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        checked = await admissible(request, self.model.facts, self.text_tokenizer, lambda: 0)
        prompt = list(checked.engine.prompt_token_ids)
        self.prompts.append(prompt)
        detokenizer = self.text_tokenizer.detokenizers.new(prompt)
        usage = pb.Usage(prompt_tokens=len(prompt))
        for number, token_id in enumerate(self.token_ids, 1):
            usage.completion_tokens = number
            scores = (
                [types_pb2.TokenLogprobs(logprob=-number)]
                if request.HasField("num_top_logprobs")
                else []
            )
            yield pb.GenerateResponse(
                chunk=pb.GenerateChunk(
                    token_ids=[token_id],
                    usage=usage,
                    logprobs=scores,
                    text=detokenizer.add(token_id) if checked.wants_text else "",
                )
            )
        yield pb.GenerateResponse(
            finish=pb.GenerateFinish(reason=types_pb2.FINISH_REASON_LENGTH, usage=usage)
        )


@asynccontextmanager
async def serving(recorder: Recorder) -> AsyncIterator[str]:
    """Run a recorder that speaks VllmEngine; yield its address."""
    server = GrpcServer(
        ServerOptions(listen="127.0.0.1:0"),
        services=(VLLM_SERVICE,),
        metrics=RpcMetrics.create(CollectorRegistry()),
    )
    service = VllmEngineService(
        cast(GenerationService, recorder),
        recorder.folder,
        gateway_tokenizer(recorder.folder, recorder.model, recorder.folder / "gateways"),
        CacheEvents(lambda name: False),
    )
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server.grpc)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()
