"""The guides of docs/architecture.md, followed step by step, and what they add in use."""

import re
from pathlib import Path

from tests.guides.extension import ROOT, Extension

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
TRANSPORT = '''
"""Messages through the memory of one process."""

from runtime.clock import SystemClock
from runtime.errors import ConfigError
from testing.memory_transport import MemoryNetwork
from transfer.transport.protocol import Transport

NETWORK = MemoryNetwork()
made: list[Transport] = []


def make(settings: object, on_refused: object) -> Transport:
    """Make a transport on the network of this process."""
    made.append(NETWORK.transport(SystemClock()))
    return made[-1]


def make_frames(settings: object, limits: object) -> object:
    """Refuse pools of several stages."""
    raise ConfigError("memory has no frames: use pools of one stage", field="transport")
'''
USE_TRANSPORT = """
import asyncio, tempfile
from pathlib import Path
from baton.values import Query, Sampling, Stop
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.checkpoints import make_checkpoint
from transfer import memory

async def tokens_by(path, transport):
    query = Query(tuple(range(3, 60)), Sampling(temperature=0), Stop(max_tokens=8, ignore_eos=True))
    async with cluster_in_process(path, transport=transport) as client:
        return (await client.complete(query, timeout_s=60)).token_ids

async def main():
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), "qwen3_5_text")
        expected = await tokens_by(path, "auto")
        print(not memory.made, end=" ")
        print(await tokens_by(path, "memory") == expected and len(memory.made) == 2)

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
import asyncio, tempfile
from pathlib import Path
import grpc
from prefill.scheduler import PrefillScheduler
from protos import generation_pb2, generation_pb2_grpc, types_pb2
from runtime.process.announce import announced_address
from testing.past_proxies import PAST_PROXIES
from tests.support.cluster.one_process import cluster_in_process
from tests.support.models.checkpoints import make_checkpoint

seen, submit = set(), PrefillScheduler.submit

def noted(self, request, *args, **options):
    seen.add(request.trace_label)
    return submit(self, request, *args, **options)

PrefillScheduler.submit = noted

async def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make_checkpoint(folder, "qwen3_5_text")
        async with cluster_in_process(path, announced=folder):
            address = await announced_address(folder / "router.json")
            async with grpc.aio.insecure_channel(address, options=PAST_PROXIES) as channel:
                request = generation_pb2.GenerateRequest(
                    token_ids=types_pb2.TokenIds(ids=[5, 6, 7]),
                    stop=types_pb2.StopConditions(max_tokens=2, ignore_eos=True),
                    skip_text=True,
                    trace_label="a label",
                )
                async for _ in generation_pb2_grpc.GenerationStub(channel).Generate(request):
                    pass
    print(sorted(seen))

asyncio.run(main())
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


def test_a_transport_is_one_file_and_two_registrations(tmp_path: Path) -> None:
    """Pools of one stage hand over by it, with the tokens that UCX gives."""
    extension = Extension(tmp_path, "pool", "transfer")
    extension.add("transfer/memory.py", TRANSPORT)
    kinds = "pool/stage/transports.py"
    extension.register(
        kinds,
        "from transfer.transport.binding",
        f"from {'.'.join(('transfer', 'memory'))} import make, make_frames",
    )
    extension.register(
        kinds, '    "cuda": TransportKind(', '    "memory": TransportKind(make, make_frames),'
    )
    extension.replace(
        "pool/stage/config.py",
        'TransportName = Literal["auto", ',
        'TransportName = Literal["memory", "auto", ',
    )
    assert extension.run(USE_TRANSPORT).splitlines()[-1] == "True True"
    assert len(extension.touched) == steps_of("Add a transport")


def test_a_request_field_is_one_line_in_five_files(tmp_path: Path) -> None:
    """A client's value reaches the engine's request in a running cluster; stubs are generated."""
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
    assert extension.run(USE_FIELD).splitlines()[-1] == "['', 'a label']", "the warm-up has none"
    assert len(extension.touched) == steps_of("Add a request field")
