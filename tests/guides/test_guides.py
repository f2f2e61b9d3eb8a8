"""The guides of docs/architecture.md, followed step by step, and what they add in use."""

import re
from pathlib import Path

import pytest

from pool.stage import transports
from pool.stage.transports import TRANSPORTS, OnRefused, TransportKind, TransportSettings
from runtime.clock import SystemClock
from testing.memory_transport import MemoryNetwork
from tests.guides.extension import ROOT, Extension
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from transfer.transport.protocol import Transport

GUIDES = (ROOT / "docs/architecture.md").read_text()
POLICY = '''
"""The worker with the last address."""

from collections.abc import Sequence

from router.workers.candidate import Candidate
from router.workers.policies import PlacementPolicy, PolicyContext


class LastAddressPolicy(PlacementPolicy):
    """The worker with the last address."""

    def costs(self, candidates: Sequence[Candidate], context: PolicyContext) -> Sequence[float]:
        """Implement `PlacementPolicy.costs`."""
        last = max(candidate.address for candidate in candidates)
        return [float(candidate.address != last) for candidate in candidates]
'''
USE_POLICY = """
import asyncio
from router.workers.policy import Policy
from tests.router.harness import running_router, token_request
from tests.support.router.fake_workers import Fabric, FakeDecode, FakePrefill, Journal, Point

async def main():
    fabric, journal = Fabric(), Journal()
    workers = [FakePrefill(f"p{i}", fabric, journal) for i in range(3)]
    pools = [FakeDecode(f"d{i}", fabric, journal) for i in range(3)]
    async with running_router(*workers, *pools, policy=Policy("last_address")) as router:
        for _ in range(5):
            await router.ask(token_request([1], max_tokens=2))
        last = {max(group, key=lambda worker: worker.address).name for group in (workers, pools)}
    used = {name for name, what in journal.entries if what in (Point.QUEUED, Point.RESERVE)}
    print(used == last)

asyncio.run(main())
"""
FAMILY = '''
"""Twin: Llama under another name."""

from models.blocks.attention import read_attention
from models.blocks.config import RawConfig
from models.blocks.mlp import read_mlp
from models.blocks.rotary import read_rope
from models.blocks.spec import DecoderSpec, LayerSpec, assemble_decoder


def read_decoder(raw: RawConfig) -> DecoderSpec:
    """Return the decoder that the config describes."""
    attention = read_attention(raw)
    layer = LayerSpec(attention, read_mlp(raw))
    return assemble_decoder(
        raw,
        rope=read_rope(raw, head_dim=attention.head_dim),
        layers=(layer,) * raw.integer("num_hidden_layers"),
    )
'''
USE_FAMILY = """
import json, tempfile, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from tests.support.models.checkpoints import make_checkpoint
from models.loader import read_model
from tests.support.models.single_stage import StageDriver

with tempfile.TemporaryDirectory() as folder:
    path = make_checkpoint(Path(folder), "llama")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([tokens])).logits[0, -1]
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = ["TwinForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    found = StageDriver(read_model(path), page_size=16).prefill({0: tokens})[0]
    print(bool(torch.allclose(found, expected, atol=1e-4, rtol=0)))
"""


USE_FIELD = """
import asyncio
from pool.request.conversion import request_from_proto
from protos import generation_pb2, types_pb2
from router.request.validate import admissible
from tests.router.harness import FACTS

request = generation_pb2.GenerateRequest(
    token_ids=types_pb2.TokenIds(ids=[1, 2, 3]), trace_label="a label"
)
checked = asyncio.run(admissible(request, FACTS, None, lambda: 7))
sent = types_pb2.EngineRequest.FromString(checked.engine.SerializeToString())
sent.request_id = "r"
limits = {"vocab_size": FACTS.vocab_size, "max_context_tokens": FACTS.max_context_tokens}
print(request_from_proto(sent, **limits).trace_label)
"""


def steps_of(title: str) -> int:
    """Return how many files the guide says that it touches."""
    section = GUIDES.split(f"## {title}\n")[1].split("\n## ")[0]
    found = re.search(r"touches (\w+) files?", section)
    assert found is not None, title
    return ("no", "one", "two", "three", "four", "five").index(found[1])


def test_a_placement_policy_is_one_file_and_one_registration(tmp_path: Path) -> None:
    extension = Extension(tmp_path, "router")
    extension.add("router/workers/last_address.py", POLICY)
    policies = "router/workers/policy.py"
    extension.register(
        policies,
        "from router.workers.candidate",
        f"from {'.'.join(('router', 'workers', 'last_address'))} import LastAddressPolicy",
    )
    extension.register(
        policies, "    PREFIX_CACHE =", '    LAST_ADDRESS = "last_address", LastAddressPolicy()'
    )
    assert extension.run(USE_POLICY) == "True\n"
    assert len(extension.touched) == steps_of("Add a policy")


def test_a_model_family_is_one_file_and_one_registration(tmp_path: Path) -> None:
    extension = Extension(tmp_path, "models")
    extension.add("models/twin.py", FAMILY)
    registry = "models/registry.py"
    extension.register(registry, "    qwen3_next,", "    twin,")
    extension.register(
        registry, '    "LlamaForCausalLM"', '    "TwinForCausalLM": twin.read_decoder,'
    )
    assert extension.run(USE_FAMILY) == "True\n"
    assert len(extension.touched) == steps_of("Add a model family")


async def test_a_transport_is_one_file_and_one_registration(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, reference: Reference
) -> None:
    """Handoffs go through the memory of this process; the frames of stages as before."""
    network = MemoryNetwork()
    made: list[Transport] = []

    def make(settings: TransportSettings, on_refused: OnRefused) -> Transport:
        made.append(network.transport(SystemClock()))
        return made[-1]

    kinds = {**TRANSPORTS, "auto": TransportKind(make, TRANSPORTS["auto"].make_frames)}
    monkeypatch.setattr(transports, "TRANSPORTS", kinds)
    async with cluster_in_process(checkpoint) as client:
        question = make_questions(1)[0]
        (right,) = on_the_wire(reference.answers([question]))
        assert shown(await client.complete(as_query(question), timeout_s=60)) == right
    assert len(made) == 2
    assert steps_of("Add a transport") == 2


def test_a_request_field_is_one_line_in_five_files(tmp_path: Path) -> None:
    """From a client's message over the router to the engine; stubs are generated."""
    extension = Extension(tmp_path, "protos", "router", "pool", "engine", "tools")
    field = "  string trace_label = 900;"
    extension.register("protos/baton/v1/generation.proto", "message GenerateRequest {", field)
    extension.register("protos/baton/v1/types.proto", "message EngineRequest {", field)
    extension.register(
        "router/request/validate.py",
        "        cache_salt=request.cache_salt,",
        "        trace_label=request.trace_label,",
    )
    extension.register(
        "pool/request/conversion.py",
        "        cache_salt=message.cache_salt,",
        "        trace_label=message.trace_label,",
    )
    extension.register("engine/core/request.py", "    cache_salt: str", '    trace_label: str = ""')
    extension.run(
        "from tools.stubs import write_stubs; from pathlib import Path; write_stubs(Path('.'))"
    )
    assert extension.run(USE_FIELD) == "a label\n"
    assert len(extension.touched) == steps_of("Add a request field")
