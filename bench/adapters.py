"""`python -m bench.adapters`: the cost of LoRA adapters on one worker.

Steps of a random model of Qwen3-0.6B's shape, in one process, by turns: without adapters, with
adapters that no row uses, with one adapter for all rows, and with an adapter of its own for every
row. Adapters update all linear layers. With `--experts` the model has the same attention in 12
layers with 32 experts, of which 4 are chosen, and adapters update all experts, too. Every ratio is
the median over the rounds of the time divided by the time of the same work without adapters in the
same round. `decode_loading` is that of steps without adapters while another thread loads one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.engine_sides import MODEL, VOCAB_SIZE, Ours
from bench.report import OtherLoad, Value, render
from engine.core.numerics import Numerics
from models.adapters import read_adapters
from models.loader import random_model
from pool.stage.adapters import LoadedAdapters
from runtime.model_files.adapter_folders import CONFIG, WEIGHTS

PAGE_SIZE = 64
MAX_LOADING = 64  # steps beside a load
NUM_LAYERS, HIDDEN, INTERMEDIATE = 28, 1024, 3072
NUM_EXPERTS, EXPERT_WIDTH, NUM_SPARSE_LAYERS = 32, 384, 12
SPARSE_MODEL = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": NUM_SPARSE_LAYERS,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": EXPERT_WIDTH,
    "norm_topk_prob": True,
}
ATTENTION = {
    "self_attn.q_proj": (2048, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 2048),
}
# The outputs and inputs of the projections of a layer of `MODEL`.
PROJECTIONS = ATTENTION | {
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
SPARSE_PROJECTIONS = ATTENTION | {
    f"mlp.experts.{expert}.{name}": shape
    for expert in range(NUM_EXPERTS)
    for name, shape in (
        ("gate_proj", (EXPERT_WIDTH, HIDDEN)),
        ("up_proj", (EXPERT_WIDTH, HIDDEN)),
        ("down_proj", (HIDDEN, EXPERT_WIDTH)),
    )
}


def write_random_adapter(
    folder: Path,
    *,
    rank: int,
    seed: int,
    num_layers: int = NUM_LAYERS,
    projections: Mapping[str, tuple[int, int]] = PROJECTIONS,
) -> None:
    """Write an adapter of these projections of each layer; by default all those of `MODEL`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for name, (outputs, inputs) in projections.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                tensors[f"{module}.lora_{factor}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def measure(
    model: dict[str, object],
    folder: Path,
    *,
    rows: int,
    rounds: int,
    steps: int,
    context: int,
    prompt: int,
) -> dict[str, Value]:
    """Return the ratios of decode steps of `rows` rows and of prompts of `prompt` tokens."""
    adapters = read_adapters(folder)
    names = [adapter.key for adapter in adapters]
    size = max(prompt, context + 4 * (rounds + 1) * (steps + 1) + rounds * (steps + MAX_LOADING))
    plain, adapted = (
        Ours(
            replace(random_model(model), adapters=found),
            numerics=Numerics.EXACT,
            page_size=PAGE_SIZE,
            max_tokens=size,
            max_rows=rows,
        )
        for found in ((), adapters)
    )
    cases: dict[str, tuple[Ours, tuple[str, ...]]] = {
        "plain": (plain, ()),
        "unused": (adapted, ()),
        "one": (adapted, (names[0],) * rows),
        "mixed": (adapted, tuple(names[row % len(names)] for row in range(rows))),
    }
    prompts = torch.randint(
        VOCAB_SIZE, (rows, max(prompt, context)), generator=torch.Generator().manual_seed(1)
    )
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, (side, chosen) in cases.items():
            side.adapters = chosen
            # One row has one adapter: for a prompt "mixed" would be "one" again.
            prefill_s = 0.0 if name == "mixed" else side.prefill(prompts[:1, :prompt])[0]
            side.begin(prompts[:, :context])
            decode_s = statistics.median(side.decode(steps))
            if turn:
                times.setdefault(f"prefill_{name}", []).append(prefill_s)
                times.setdefault(f"decode_{name}", []).append(decode_s)
    found = _loading(adapted, model, folder, rounds=rounds, steps=steps)
    for part in ("prefill", "decode"):
        base = times[f"{part}_plain"]
        found[f"{part}_plain_ms"] = round(1000 * statistics.median(base), 1)
        for name in ("unused", "one", "mixed") if part == "decode" else ("unused", "one"):
            pairs = zip(times[f"{part}_{name}"], base, strict=True)
            found[f"{part}_{name}"] = round(statistics.median(mine / its for mine, its in pairs), 3)
    return found


def _loading(
    side: Ours, model: dict[str, object], folder: Path, *, rounds: int, steps: int
) -> dict[str, Value]:
    """Return the time of a load beside decode steps, and the ratio of these steps."""
    adapters = LoadedAdapters(folder, random_model(model), side.model, lambda key: None)
    side.adapters = ()
    key = adapters.keys[-1]
    times, ratios = list[float](), list[float]()
    for _ in range(rounds):
        base = statistics.median(side.decode(steps))
        adapters.drop(key)
        loading = adapters.loading.submit(_timed, adapters, key)
        beside = list[float]()
        while not loading.done():
            beside += side.decode(1)
        times.append(loading.result())
        ratios.append(statistics.median(beside) / base)
    return {
        "load_ms": round(1000 * statistics.median(times), 1),
        "decode_loading": round(statistics.median(ratios), 3),
    }


def _timed(adapters: LoadedAdapters, key: str) -> float:
    started = time.perf_counter()
    adapters.load(key)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("threads", 2),
        ("adapters", 8),
        ("rank", 16),
        ("rows", 8),
        ("rounds", 5),
        ("steps", 8),
        ("context", 128),
        ("prompt", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--experts", action="store_true", help="of a model with experts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(flags.adapters):
            write_random_adapter(
                Path(folder) / f"a{seed}",
                rank=flags.rank,
                seed=seed,
                num_layers=NUM_SPARSE_LAYERS if flags.experts else NUM_LAYERS,
                projections=SPARSE_PROJECTIONS if flags.experts else PROJECTIONS,
            )
        values = measure(
            SPARSE_MODEL if flags.experts else MODEL,
            Path(folder),
            rows=flags.rows,
            rounds=flags.rounds,
            steps=flags.steps,
            context=flags.context,
            prompt=flags.prompt,
        )
    settings = {name: getattr(flags, name) for name in ("threads", "adapters", "rank", "rows")}
    print(render("adapters", {**settings, **values, **load.figures()}, as_json=flags.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
