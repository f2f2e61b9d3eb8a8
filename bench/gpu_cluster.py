"""`python -m bench.gpu_cluster`: a whole cluster on one device, over gRPC and UCX.

Measures how much of each prompt's handoff prefill does not hide. One prefill worker and a decode
pool of two stages serve an 8B-shaped Llama with random bf16 weights. The checkpoint is first
written to disk (16 GB, in a temporary folder), and the workers load it like any other. Prompts
arrive one at a time, so that nothing else hides a handoff. `exposed_of_prefill` is the exposed part
over the time of prefill, medians of both. `--model` uses an existing checkpoint, `--device cpu` the
host's cores.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.cluster_config import ClusterConfig
from baton.values import Completion, Query, Sampling, Stop
from bench.command import running_cluster
from bench.gpu_configs import LLAMA_8B
from bench.gpu_model import DeviceRandom
from bench.report import Value, render
from engine.core.layer_range import LayerRange
from engine.core.numerics import Numerics
from models.blocks.weights import Weights
from models.decoder import DecoderStage
from models.loader import random_model
from runtime.errors import BatonError, ConfigError

MEMORY_MB = {"cpu": 256, "cuda": 4096}
OUTPUT_TOKENS = 32
SHARD_BYTES = 2 << 30
READY_S = 240.0  # reading the checkpoint, compiling kernels and capturing graphs, once per process
ANSWER_S = 60.0


class _ShardWriter:
    """`WeightSource` of random weights that also writes them, in files of about `shard_bytes`."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._random = DeviceRandom()
        self._shard: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}

    def has(self, name: str) -> bool:
        return self._random.has(name)

    def read(self, name: str, out: Tensor, *, item: tuple[int, int] | None = None) -> None:
        """Implement `WeightSource.read`."""
        self._random.read(name, out, item=item)
        self._shard[name] = out.detach().to("cpu", copy=True)
        if sum(tensor.nbytes for tensor in self._shard.values()) >= self._shard_bytes:
            self._flush()

    def row_scales(self, name: str, *, item: int | None = None) -> None:
        """Implement `WeightSource.row_scales`."""

    def finish(self) -> None:
        """Write the remaining tensors and the index."""
        self._flush()
        index = {"weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(index), encoding="utf-8"
        )

    def _flush(self) -> None:
        file = f"model-{len(set(self._files.values())):05}.safetensors"
        save_file(self._shard, self._folder / file)
        self._files |= dict.fromkeys(self._shard, file)
        self._shard = {}


def write_checkpoint(
    folder: Path, config: dict[str, object], device: torch.device, *, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a checkpoint with random weights, generated on `device`; return its folder."""
    description, source = random_model(config), _ShardWriter(folder, shard_bytes)
    weights = Weights(
        source,
        prefix="",
        dtype=getattr(torch, description.facts.dtype),
        numerics=Numerics.FAST,
        device=device,
    )
    DecoderStage(
        facts=description.facts,
        spec=description.spec,
        weights=weights,
        layer_range=LayerRange(0, description.facts.num_layers),
    )
    source.finish()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def measure(
    model: Path, device: str, *, prompt_tokens: int, prompts: int
) -> dict[str, Value]:
    """Serve the model and send it prompts of random tokens.

    Raises:
        BatonError: the model cannot be served, or a request fails.
    """
    numerics = Numerics.EXACT if device == "cpu" else Numerics.FAST
    kind = device.partition(":")[0]
    config = ClusterConfig(
        model=model,
        decode_pp=2,
        listen="127.0.0.1:0",
        log_level="warning",
        ready_timeout_s=READY_S,
        one_core_each=kind == "cpu",
        worker_flags=(
            "--device",
            device,
            "--numerics",
            numerics.value,
            "--memory-mb",
            str(MEMORY_MB[kind]),
        ),
    )
    draw = random.Random(0)
    async with running_cluster(config) as (_, client):
        vocab_size = (await client.model_info()).vocab_size
        answers = list[Completion]()
        for _ in range(prompts + 1):  # the first one is the warm-up
            query = Query(
                prompt=tuple(draw.randrange(vocab_size) for _ in range(prompt_tokens)),
                sampling=Sampling(temperature=0.0),
                stop=Stop(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
                skip_text=True,
            )
            answers.append(await client.complete(query, timeout_s=ANSWER_S))
    return {
        "device": device,
        "prompt_tokens": prompt_tokens,
        "prompts": prompts,
        **summary(answers[1:]),
    }


def summary(answers: list[Completion]) -> dict[str, Value]:
    """Return the medians; raise BatonError for a response of another length or without timings."""
    prefill_s, exposed_s, decode_s = list[float](), list[float](), list[float]()
    for answer in answers:
        timings = answer.finish.timings
        if (
            timings.prefill_s is None
            or timings.transfer_exposed_s is None
            or timings.decode_s is None
        ):
            raise BatonError(f"an answer lacks timings: {timings}")
        if len(answer.token_ids) != OUTPUT_TOKENS:
            raise BatonError(f"an answer has {len(answer.token_ids)} tokens, not {OUTPUT_TOKENS}")
        prefill_s.append(timings.prefill_s)
        exposed_s.append(timings.transfer_exposed_s)
        decode_s.append(timings.decode_s / (OUTPUT_TOKENS - 1))
    return {
        "prefill_ms": 1e3 * statistics.median(prefill_s),
        "exposed_ms": 1e3 * statistics.median(exposed_s),
        "exposed_of_prefill": statistics.median(exposed_s) / statistics.median(prefill_s),
        "decode_step_ms": 1e3 * statistics.median(decode_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="device of the workers: cuda, cuda:N or cpu; default cuda"
    )
    parser.add_argument(
        "--model", type=Path, help="model directory; default: random weights of 8B shape"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=2048, help="tokens per prompt; default 2048"
    )
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts; default 8")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    try:
        if flags.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"device {flags.device} needs a CUDA device", field="device")
        with tempfile.TemporaryDirectory(prefix="baton-model-") as folder:
            model = flags.model or write_checkpoint(
                Path(folder), LLAMA_8B, torch.device(flags.device)
            )
            torch.cuda.empty_cache()  # free the memory for the workers
            values = asyncio.run(
                measure(
                    model, flags.device, prompt_tokens=flags.prompt_tokens, prompts=flags.prompts
                )
            )
    except BatonError as error:
        print(f"bench.gpu_cluster: {error}", file=sys.stderr)
        return 1
    print(render("gpu_cluster", values, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
