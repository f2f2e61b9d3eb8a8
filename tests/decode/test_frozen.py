"""Drafts that read the target's cache: chains are those of transformers, the output is that of
plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma4AssistantForCausalLM

from engine.backends.cpu.attention import CpuAttention
from engine.contracts.model import StageOutput
from engine.core.batch import ForwardBatch
from engine.core.draft_trees import SpecInfo, TokenTree
from engine.core.numerics import Numerics
from engine.core.request import Request
from engine.memory.layout import CacheKind
from engine.memory.pools import StagePools
from engine.speculative.contracts.verify import AcceptedRun
from engine.speculative.drafters.frozen import FrozenDrafter
from engine.speculative.trees.draft_batches import followed_rows
from models.drafts.loader import read_draft
from models.loader import read_model
from runtime.errors import ConfigError
from tests.decode.test_speculation import SAMPLING, assert_nothing_leaked, shown
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import as_query, make_questions, on_the_wire
from tests.support.cluster.questions import shown as answered
from tests.support.cluster.reference import Reference
from tests.support.models.checkpoints import (
    add_assistant,
    every_layer_reads,
    make_checkpoint,
    oracle,
)
from tests.support.models.tiny_models import GEMMA4, LLAMA, tiny
from tests.support.pool.local_pool import Speculation, local_pool

WANTED = [
    Request(
        f"r{i}",
        tuple(
            torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        ),
        10,
        SAMPLING[i],
        num_top_logprobs=2,
    )
    for i, length in enumerate((1, 12, 47))
]
STEPS, READ = (
    3,
    {"sliding_attention": 2, "full_attention": 3},
)  # the target's last layer of each kind


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("frozen"), "gemma4")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    return add_assistant(target, target.parent / "assistant")


class Theirs:
    """Chains drafted by transformers (`SinglePositionMultiTokenCandidateGenerator`)."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._target: Any = oracle(target)
        with every_layer_reads():
            self._draft: Any = Gemma4AssistantForCausalLM.from_pretrained(draft)
        self._draft.train(mode=False)
        self._window = self._target.config.sliding_window

    @torch.no_grad()
    def chain(self, tokens: Sequence[int], steps: int) -> tuple[list[int], torch.Tensor]:
        """Return the tokens after these, the last of which is not cached, and their logits [steps,
        vocab]."""
        cache: Any = DynamicCache()
        done = self._target.model(
            torch.tensor([tokens[:-1]]), past_key_values=cache, use_cache=True
        )
        hidden, found, logits = done.last_hidden_state[:, -1:], [tokens[-1]], []
        seen = {"sliding_attention": self._window, "full_attention": len(tokens)}
        keys = {
            kind: tuple(
                part[:, :, -seen[kind] :]
                for part in (cache.layers[layer_id].keys, cache.layers[layer_id].values)
            )
            for kind, layer_id in READ.items()
        }
        for _ in range(steps):
            embedded = self._target.get_input_embeddings()(torch.tensor([found[-1:]]))
            out = self._draft(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                shared_kv_states=keys,
                position_ids=torch.tensor([[len(tokens) - 1]]),
            )
            logits.append(out.logits[0, 0])
            found.append(int(logits[-1].argmax()))
            hidden = out.last_hidden_state
        return found[1:], torch.stack(logits)


@dataclass
class CheckedDrafter:
    """A drafter whose chains and logits are compared with those of transformers."""

    inner: FrozenDrafter
    logits: list[torch.Tensor]
    theirs: Theirs
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_chains: int = 0

    def propose(
        self, batch: ForwardBatch, output: StageOutput, runs: Sequence[AcceptedRun]
    ) -> list[TokenTree]:
        self.logits.clear()
        trees = self.inner.propose(batch, output, runs)
        grown = [row for row in followed_rows(batch, runs) if row.num_nodes]
        assert isinstance(batch.spec_info, SpecInfo)
        for row in followed_rows(batch, runs):
            known = self.tokens.setdefault(batch.request_keys[row.row], [])
            known[row.position :] = [
                *batch.spec_info.token_ids[row.features].tolist(),
                row.next_tokens[-1],
            ]
        for index, row in enumerate(grown):
            expected, logits = self.theirs.chain(
                self.tokens[batch.request_keys[row.row]], len(self.logits)
            )
            torch.testing.assert_close(
                torch.stack(self.logits)[:, index], logits, atol=1e-4, rtol=0
            )
            (tree,) = (tree for run, tree in zip(runs, trees, strict=True) if run.row == row.row)
            assert list(tree.token_ids) == expected[: len(tree)]
            self.num_chains += 1
        return trees

    def begin(self, batch: ForwardBatch) -> list[TokenTree]:
        return self.inner.begin(batch)


def test_chains_are_those_of_transformers_and_change_nothing(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    description, made = read_model(target), list[CheckedDrafter]()
    read = read_draft(draft, description)
    with local_pool(description) as pool:
        expected = shown(pool.generate(WANTED))

    def build(pools: StagePools) -> CheckedDrafter:
        model, logits = read.load_frozen(numerics=Numerics.EXACT), list[torch.Tensor]()
        scored = model.logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            logits.append(scored(hidden))
            return logits[-1]

        monkeypatch.setattr(model, "logits", recorded)
        kv, windows = (
            {layer_id: pools.of_kind(kind)[layer_id]}
            for kind, layer_id in ((CacheKind.KV, 3), (CacheKind.WINDOW, 2))
        )
        attention = CpuAttention(
            kv_pools=kv, window_pools=windows, geometry=model.attention_geometry(16)
        )
        made.append(
            CheckedDrafter(
                FrozenDrafter(model=model, attention=attention, steps=STEPS),
                logits,
                Theirs(target, draft),
            )
        )
        return made[-1]

    speculation = Speculation(
        lambda num_pages: made[0], STEPS, read.capture_layers, over_pools=build
    )
    with local_pool(description, 2, chunk_tokens=16, speculation=speculation) as pool:
        assert shown(pool.generate(WANTED)) == expected
        assert_nothing_leaked(pool)
    assert made[0].num_chains > 10
    assert made[0].inner.num_plans["draft_round"] <= made[0].num_chains


async def test_a_cluster_drafts_so_after_handoffs_and_cached_prompts(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, proposed = FrozenDrafter.propose, list[int]()

    def counted(
        drafter: FrozenDrafter,
        batch: ForwardBatch,
        output: StageOutput,
        runs: Sequence[AcceptedRun],
    ) -> list[TokenTree]:
        trees = plain(drafter, batch, output, runs)
        proposed.extend(map(len, trees))
        return trees

    monkeypatch.setattr(FrozenDrafter, "propose", counted)
    questions = make_questions(2, seed=29, max_prompt=150, max_tokens=12)
    expected = on_the_wire(Reference(target).answers(questions))
    drafting = {
        "draft": draft,
        "spec_topk": 1,
        "spec_steps": STEPS,
        "spec_draft_tokens": STEPS,
        "spec_adaptive": False,
    }
    async with cluster_in_process(
        target, prefill_pp=2, decode_pp=2, prefill={"draft": draft}, decode=drafting
    ) as client:
        for _ in range(2):
            completions = [
                await client.complete(as_query(question), timeout_s=60) for question in questions
            ]
            assert [answered(completion) for completion in completions] == expected
    assert sum(proposed) > 10


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (LLAMA, "rope_parameters are not the target's"),
        ({**GEMMA4, "sliding_window": 48}, "sliding_window and layer_types"),
        ({**GEMMA4, "num_key_value_heads": 4}, "are 2 and 16, the target caches 4 and 16"),
        ({**GEMMA4, "hidden_size": 32}, "backbone_hidden_size is 72, the target's is 32"),
    ],
)
def test_the_draft_of_another_model_is_refused(
    draft: Path, config: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_draft(draft, tiny(config)).cache_specs(16)
