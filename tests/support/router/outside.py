"""A client that knows nothing of this repository: it asks the server what its services look like,
and speaks JSON."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2 as details_pb2
from google.rpc.status_pb2 import Status
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

Json = dict[str, Any]
GENERATE = "baton.v1.Generation.Generate"
SHORT: Json = {"text": "Mia has a red", "stop": {"maxTokens": 4}, "sampling": {"temperature": 0}}
DETAILS = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        details_pb2.ErrorInfo,
        details_pb2.BadRequest,
        details_pb2.RetryInfo,
        details_pb2.QuotaFailure,
        details_pb2.PreconditionFailure,
        details_pb2.RequestInfo,
    )
}


class Outsider:
    """Calls by name, over what server reflection says."""

    def __init__(self, address: str) -> None:
        self._blocking = grpc.insecure_channel(address)
        self.channel = grpc.aio.insecure_channel(address)
        self._database = ProtoReflectionDescriptorDatabase(self._blocking)
        self._pool = DescriptorPool(self._database)

    async def close(self) -> None:
        self._blocking.close()
        await self.channel.close()

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def message(self, full_name: str) -> Descriptor:
        found: Descriptor = self._pool.FindMessageTypeByName(full_name)
        return found

    async def ask(
        self, method: str, request: Json, *, timeout_s: float = 60
    ) -> AsyncIterator[Json]:
        """Yield every response of a method, "baton.v1.Generation.Generate", without default
        values."""
        service, _, name = method.rpartition(".")
        found = self._pool.FindServiceByName(service).methods_by_name[name]
        path = f"/{found.containing_service.full_name}/{found.name}"
        message = json_format.ParseDict(request, GetMessageClass(found.input_type)())
        kinds: Json = {
            "request_serializer": _as_bytes,
            "response_deserializer": GetMessageClass(found.output_type).FromString,
        }
        if not found.server_streaming:
            yield json_format.MessageToDict(
                await self.channel.unary_unary(path, **kinds)(message, timeout=timeout_s)
            )
            return
        async for response in self.channel.unary_stream(path, **kinds)(message, timeout=timeout_s):
            yield json_format.MessageToDict(response)


def _as_bytes(message: Message) -> bytes:
    return message.SerializeToString()


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Return the google.rpc details of a failed call by their short names."""
    status = Status()
    raw = next(
        (value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"), b""
    )
    status.ParseFromString(raw if isinstance(raw, bytes) else raw.encode())
    found = {}
    for packed in status.details:
        name = packed.TypeName()
        detail = DETAILS[name]()
        packed.Unpack(detail)
        found[name.rpartition(".")[2]] = detail
    return found


def merged(base: Json, change: Json) -> Json:
    """Merge `change` into `base`, message by message; a prompt replaces the prompt."""
    prompts = {"text", "tokenIds", "chat"}
    kept = {
        key: value
        for key, value in base.items()
        if not (prompts & change.keys() and key in prompts)
    }
    for key, value in change.items():
        known = kept.get(key)
        kept[key] = (
            merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else value
        )
    return kept


class Answer:
    """All responses of one request."""

    def __init__(self, responses: list[Json]) -> None:
        self.responses = responses
        self.chunks = [response["chunk"] for response in responses if "chunk" in response]
        self.finishes = [response["finish"] for response in responses if "finish" in response]

    @property
    def text(self) -> str:
        return "".join(chunk.get("text", "") for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.get("tokenIds", [])]


async def ask(outsider: Outsider, change: Json) -> Answer:
    return Answer([response async for response in outsider.ask(GENERATE, merged(SHORT, change))])
