"""An ordinary model as a draft: it proposes what it would write itself, and no answer changes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.attention import AttentionGeometry
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import TokenTree
from engine.core.numerics import Numerics
from engine.core.request import Request, SamplingParams
from engine.speculative.attention.draft_attention import DraftAttention
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.contracts.draft_model import DraftModel
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.eagle import EagleDrafter
from models.drafts.loader import read_draft
from models.loader import ModelDescription, read_model
from pool.stage.config import WorkerConfig
from pool.stage.plan import plan_stage
from runtime.errors import ConfigError
from tests.decode.test_speculation import assert_nothing_leaked, requests, shown
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.guided import write_character_tokenizer
from tests.support.models.tiny_models import LLAMA, VOCAB_SIZE, tiny
from tests.support.pool.local_pool import Speculation, local_pool

PAGE_SIZE, STEPS = 16, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


def with_vocabulary(source: Path, target: Path, size: int) -> Path:
    """Copy a checkpoint with its vocabulary padded or cut."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if len(tensor) == VOCAB_SIZE:
            padded = torch.zeros(max(size, VOCAB_SIZE), *tensor.shape[1:], dtype=tensor.dtype)
            padded[:VOCAB_SIZE] = tensor
            tensors[name] = padded[:size].contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    return target


class Listener(EagleDrafter):
    """A drafter that keeps the tokens sampled so far and its trees, for one request."""

    sampled: list[int]
    drafted: list[tuple[int, TokenTree]]

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        trees = super().propose(batch, output, runs)
        for run, tree in zip(runs, trees, strict=True):
            self.sampled += [token.token_id for token in run.tokens]
            self.drafted.append((len(self.sampled), tree))
        return trees


def drafter_of(model: DraftModel, num_pages: int, topk: int = 1) -> Listener:
    pools = {
        spec.layer_id: torch.full((num_pages, *spec.record_shape), float("nan"))
        for spec in model.cache_specs(PAGE_SIZE)
    }
    geometry = model.attention_geometry(PAGE_SIZE)
    assert isinstance(geometry, AttentionGeometry)
    attention = DraftAttention.over_kv(
        CpuAttention(kv_pools=pools, geometry=geometry),
        MultiStepAttention(kv_pools=pools, geometry=geometry),
        geometry.page_size,
    )
    drafter = Listener(model=model, attention=attention, topk=topk, steps=STEPS)
    drafter.sampled, drafter.drafted = [], []
    return drafter


def greedy(description: ModelDescription, prompt: Sequence[int], count: int) -> list[int]:
    request = Request("alone", tuple(prompt), count, SamplingParams(temperature=0))
    with local_pool(description) as pool:
        (answer,) = pool.generate([request])
    return [token.token_id for token in answer.tokens]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_it_drafts_what_it_would_write_without_the_first_token(folder: Path, family: str) -> None:
    torch.set_num_threads(1)
    small = make_checkpoint(folder, family)
    target = tiny(LLAMA)
    prompt = tuple(range(40, 75))
    made: list[Listener] = []

    def build(num_pages: int) -> Listener:
        made.append(drafter_of(read_draft(small, target).load(numerics=Numerics.EXACT), num_pages))
        return made[0]

    last = frozenset({target.facts.num_layers - 1})
    request = Request("r", prompt, 12, SamplingParams(temperature=0))
    with local_pool(target, speculation=Speculation(build, STEPS, last)) as pool:
        (answer,) = pool.generate([request])
    assert [token.token_id for token in answer.tokens] == greedy(target, prompt, 12)
    for count, tree in made[0].drafted[:6]:
        known = [*prompt[1:], *made[0].sampled[:count]]
        assert list(tree.token_ids) == greedy(read_model(small), known, STEPS)[: len(tree)]
    assert any(len(tree) == STEPS for _, tree in made[0].drafted)


@pytest.mark.parametrize("size", [VOCAB_SIZE - 60, VOCAB_SIZE + 40])
@pytest.mark.parametrize(("family", "topk"), [("llama", 1), ("qwen2", 3)])
def test_padded_vocabularies_change_no_answer(
    folder: Path, tmp_path: Path, family: str, topk: int, size: int
) -> None:
    torch.set_num_threads(1)
    small = with_vocabulary(make_checkpoint(folder, family), tmp_path / "small", size)
    target = tiny(LLAMA)

    def build(num_pages: int) -> Listener:
        return drafter_of(read_draft(small, target).load(numerics=Numerics.EXACT), num_pages, topk)

    last = frozenset({target.facts.num_layers - 1})
    with local_pool(target) as pool:
        expected = shown(pool.generate(requests()))
    with local_pool(target, 2, speculation=Speculation(build, STEPS, last)) as pool:
        assert shown(pool.generate(requests())) == expected
        assert_nothing_leaked(pool)


def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(make_checkpoint(folder, "llama"), tmp_path / "model"))
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    for each in (model, draft):
        write_character_tokenizer(each)
    config = WorkerConfig(model=model, draft=draft, memory_mb=64)
    assert plan_stage(config, speculates=True).has_draft_model
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="the draft has another tokenizer: token ") as refused:
        plan_stage(config, speculates=True)
    assert refused.value.field == "draft"


def test_windows_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="draft architecture 'Gemma3ForCausalLM'"):
        read_draft(make_checkpoint(folder, "gemma3"), tiny(LLAMA))
