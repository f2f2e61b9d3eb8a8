"""Parsers of external bytes: (name, generator of valid ones, the parser, allowed errors)."""

import json
import random
import struct
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError, Message

from engine.contracts.model import StageOutput
from engine.core.batch import ForwardMode, OutputOpening, OutputRow, SamplingRow, ScoringRow
from engine.core.draft_trees import AcceptedNodes, SpecRow, TokenTree, Verified
from engine.core.layer_range import LayerRange
from engine.core.request import SampledToken, SamplingParams, TokenLogprobs
from engine.core.rows import Row, build_batch
from engine.core.state_rows import StateRow, StateSnapshot
from engine.pipeline import frames, records
from engine.pipeline.channel import Packet, PacketKind
from engine.pipeline.frames import TensorRoute
from models.checkpoint import open_tensors
from pool.pipeline.stage_channel import StageAddress
from pool.request.conversion import request_from_proto
from pool.stage.config import WorkerConfig
from protos import generation_pb2, pipeline_pb2, transfer_pb2, types_pb2
from router.request.validate import admissible
from router.workers.discovery import parse_target
from runtime.config import load
from runtime.errors import (
    BatonError,
    ConfigError,
    IncompatiblePeerError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    PeerLostError,
)
from runtime.grammar import Grammar, GrammarKind
from runtime.rpc.message_bounds import MessageBounds, bounded
from tests.fuzz.engine import Target
from tests.router.harness import FACTS
from transfer.plan import codec
from transfer.plan.handoff_terms import (
    DestinationTerms,
    SourceTerms,
    StageEndpoint,
    StageSessionEvent,
    StageSessionState,
)
from transfer.transport.authenticator import new_key
from transfer.ucx.address import frame_address, unframe_address

_FOLDER = Path(
    tempfile.mkdtemp(prefix="fuzz")
)  # one per process; memory-backed where the system's is


# Frames between stages.


def _batch_packet(numbers: random.Random) -> Packet:
    is_tree = numbers.random() < 0.4
    rows = [_row(numbers, key, is_tree=is_tree) for key in range(numbers.randrange(4))]
    batch = build_batch(ForwardMode.VERIFY if is_tree else ForwardMode.PREFILL, rows)
    batch.ended_keys = tuple(range(numbers.randrange(3)))
    tensors = torch.zeros(batch.num_tokens, 4, dtype=torch.bfloat16)
    return records.pack_batch(
        numbers.getrandbits(32),
        batch,
        StageOutput(
            hidden=tensors if numbers.random() < 0.8 else None,
            aux_hidden={3: tensors} if numbers.random() < 0.3 else {},
        ),
    )


def _row(numbers: random.Random, key: int, *, is_tree: bool) -> Row:
    count = numbers.randrange(1, 5)
    tokens = [numbers.randrange(100) for _ in range(count)]
    grammar = Grammar.of(GrammarKind.REGEX, "[a-z]+") if numbers.random() < 0.3 else None
    opening = OutputOpening((1, 2, 3), grammar) if numbers.random() < 0.5 else None
    output = (
        OutputRow(key, 2, (4,), opening, numbers.random() < 0.5) if numbers.random() < 0.8 else None
    )
    params = SamplingParams(
        seed=numbers.getrandbits(64), logit_bias=((3, 0.5),) * numbers.randrange(3)
    )
    sampling = SamplingRow(params, 7, 3, (5,), 9, output) if numbers.random() < 0.8 else None
    spec = (
        SpecRow(
            tuple(numbers.randrange(-1, node) if node else -1 for node in range(count)),
            AcceptedNodes(3, (0, 1)),
            None,
            0,
            4,
        )
        if is_tree
        else None
    )
    scoring = ScoringRow((1, 2), 3) if numbers.random() < 0.2 else None
    states = StateRow(3, (StateSnapshot(64, 2),)) if numbers.random() < 0.2 else StateRow()
    return Row(key, tokens, numbers.randrange(50), [1, 2, 3], 1, sampling, spec, scoring, states)


def _result_packet(numbers: random.Random) -> Packet:
    count = numbers.randrange(4)
    tokens = [
        SampledToken(7, TokenLogprobs(-1.0, ((7, -1.0), (8, -2.0))), "no such token" * (place % 2))
        for place in range(count)
    ]
    verified = [Verified((0,), TokenTree((5, 6), (-1, 0)))] * count
    return records.pack_result(
        numbers.getrandbits(32), tokens, verified, [tuple(tokens)] * numbers.randrange(2)
    )


def _packet(numbers: random.Random) -> Packet:
    made: Callable[[random.Random], Packet] = numbers.choice((_batch_packet, _result_packet))
    return made(numbers) if numbers.random() < 0.9 else records.pack_error(3, "stage 1: no")


def _frame(numbers: random.Random) -> bytes:
    route = TensorRoute.BESIDE if numbers.random() < 0.1 else TensorRoute.WITHIN
    return bytes(frames.write(route, _packet(numbers)))


def _read_frame(data: bytes) -> object:
    frame = frames.read(memoryview(data))
    tensors: tuple[torch.Tensor, ...] = ()
    if frame.specs and frame.route is TensorRoute.WITHIN:
        tensors = frames.cut(torch.tensor(list(frame.run), dtype=torch.uint8), frame.specs)
    packet = Packet(frame.record, tensors, frame.kind, frame.sequence)
    if packet.kind is PacketKind.BATCH and frame.route is TensorRoute.BESIDE:
        return frame
    read = {
        PacketKind.BATCH: records.unpack_batch,
        PacketKind.RESULT: records.unpack_result,
        PacketKind.ERROR: records.unpack_error,
    }[packet.kind]
    return read(packet)


def _read_genuine(data: bytes) -> object:
    """Seal the bytes as a valid sender would, so that parsing passes magic and schema."""
    return _read_frame(
        bytes(frames.write(TensorRoute.WITHIN, records.pack_error(1, "")))[:5] + data[5:]
    )


# Messages of gRPC.


_STAGES = (
    StageEndpoint(LayerRange(0, 2), b"\x00address\xff", "life-1"),
    StageEndpoint(LayerRange(2, 4), b"", "life-2"),
)
_SOURCE = SourceTerms("digest", "text", 4, 9, 8, (3, 1, 2), 7, _STAGES)
_DESTINATION = DestinationTerms(
    "session", 2, 0xFFFFFFFF_02000000, (9, 8, 7), 1, _STAGES, "plan", new_key()
)
_EVENT = StageSessionEvent("session", 3, StageSessionState.FAILED, "PEER_LOST", "gone", 12345)


def _read_source(data: bytes) -> object:
    return codec.source_from_proto(transfer_pb2.SourceTerms.FromString(data))


def _read_destination(data: bytes) -> object:
    return codec.destination_from_proto(transfer_pb2.DestinationTerms.FromString(data))


def _read_event(data: bytes) -> object:
    return codec.event_from_proto(pipeline_pb2.StageSession.FromString(data))


def _always(message: Message) -> Callable[[random.Random], bytes]:
    data = message.SerializeToString()
    return lambda numbers: data


def _generate_request(numbers: random.Random) -> bytes:
    ids = [numbers.randrange(50) for _ in range(numbers.randrange(1, 9))]
    request = generation_pb2.GenerateRequest(
        request_id="r",
        token_ids=types_pb2.TokenIds(ids=ids),
        sampling=types_pb2.SamplingParams(
            temperature=0.5, top_k=4, top_p=0.9, seed=numbers.getrandbits(63)
        ),
    )
    request.sampling.logit_bias[3] = 0.5
    return request.SerializeToString()


def _read_counted(data: bytes) -> object:
    """Check that the count before parsing equals that of the parsed message, unless it is
    refused."""
    request = bounded(
        generation_pb2.GenerateRequest.FromString, MessageBounds(1 << 20, uncounted_bytes=0)
    )(data)
    assert (
        request.SerializeToString()
        == generation_pb2.GenerateRequest.FromString(data).SerializeToString()
    )
    return request


def _admit(data: bytes) -> object:
    request = generation_pb2.GenerateRequest.FromString(data)
    return _ended(admissible(request, FACTS, None, new_seed=lambda: 42))


def _ended(coroutine: Coroutine[Any, Any, object]) -> object:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    finally:
        coroutine.close()
    raise AssertionError("it waits for something")


def _engine_request(numbers: random.Random) -> bytes:
    request = generation_pb2.GenerateRequest.FromString(_generate_request(numbers))
    admitted = _ended(admissible(request, FACTS, None, new_seed=lambda: 42))
    data: bytes = admitted.engine.SerializeToString()  # type: ignore[attr-defined]
    return data


def _read_engine_request(data: bytes) -> object:
    return request_from_proto(
        types_pb2.EngineRequest.FromString(data),
        vocab_size=FACTS.vocab_size,
        max_context_tokens=FACTS.max_context_tokens,
    )


# Files and texts.


def _safetensors(numbers: random.Random) -> bytes:
    count = numbers.randrange(1, 4)
    header = {
        f"model.layers.{place}.weight": {
            "dtype": "F32",
            "shape": [2, 2],
            "data_offsets": [16 * place, 16 * place + 16],
        }
        for place in range(count)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16 * count)


def _read_safetensors(data: bytes) -> object:
    (_FOLDER / "model.safetensors").write_bytes(data)
    found = open_tensors(_FOLDER)
    for entry in found.values():
        assert 0 <= entry.offset <= entry.offset + entry.num_bytes <= len(data), entry
        assert all(extent >= 0 for extent in entry.shape), entry
    return found


def _index(numbers: random.Random) -> bytes:
    names = ["model.layers.0.weight"] * numbers.randrange(1, 3)
    return json.dumps(
        {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    ).encode()


def _read_index(data: bytes) -> object:
    file = _FOLDER / "index" / "a.safetensors"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(_safetensors(random.Random(0)))
    (_FOLDER / "index" / "model.safetensors.index.json").write_bytes(data)
    return open_tensors(_FOLDER / "index")


def _toml(numbers: random.Random) -> bytes:
    return (
        f'[router]\nmax_waiting = 3\n[prefill]\nmodel = "m"\npage_size = 64\n'
        f'listen = "[::1]:{numbers.randrange(9999)}"\n'
        'transport_ports = "7000-7010"\ncuda_graphs = false\ndrain_s = 1.5\n'
    ).encode()


def _read_toml(data: bytes) -> object:
    file = _FOLDER / "baton.toml"
    file.write_bytes(data)
    return load(WorkerConfig, section="prefill", flags={}, file=file)


def _address(numbers: random.Random) -> bytes:
    return numbers.choice(
        (b"127.0.0.1:7000", b"[::1]:80", b"dns:///name.example:7000", b"k8s:///name/service:port")
    )


def _read_stage_address(data: bytes) -> object:
    return StageAddress.unpack(data)


TARGETS = {
    target.name: target
    for target in (
        Target("frames", _frame, _read_frame, (IntegrityError, InternalError)),
        Target("records", _frame, _read_genuine, (IntegrityError, InternalError)),
        Target(
            "stage_address",
            lambda numbers: StageAddress(
                1, b"frames", "nccl", "GPU-1", "", is_demanded=True
            ).pack(),
            _read_stage_address,
            (PeerLostError,),
        ),
        Target(
            "ucx_address",
            lambda numbers: frame_address(numbers.randbytes(40)),
            unframe_address,
            (ValueError,),
        ),
        Target(
            "source_terms",
            _always(codec.source_to_proto(_SOURCE)),
            _read_source,
            (DecodeError, IncompatiblePeerError),
        ),
        Target(
            "destination_terms",
            _always(codec.destination_to_proto(_DESTINATION)),
            _read_destination,
            (DecodeError, IncompatiblePeerError),
        ),
        Target(
            "session_event",
            _always(codec.event_to_proto(_EVENT)),
            _read_event,
            (DecodeError, InvalidRequestError),
        ),
        Target("generate_request", _generate_request, _admit, (DecodeError, BatonError)),
        Target("counted_request", _generate_request, _read_counted, (InvalidRequestError,)),
        Target(
            "engine_request",
            _engine_request,
            _read_engine_request,
            (DecodeError, InvalidRequestError),
        ),
        Target("safetensors", _safetensors, _read_safetensors, (ConfigError,)),
        Target("safetensors_index", _index, _read_index, (ConfigError,)),
        Target("toml", _toml, _read_toml, (ConfigError,)),
        Target(
            "service_address",
            _address,
            lambda data: parse_target(data.decode(errors="replace")),
            (ConfigError,),
        ),
    )
}
