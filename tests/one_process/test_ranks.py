"""Pools whose stages are shared by ranks: the bits of one process, for any widths on both sides of
a handoff."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.blocks import linear
from models.loader import read_model
from pool.check import report
from pool.stage.config import WorkerConfig
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.drafts.eagle import save_draft
from tests.support.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[Shown]:
    return on_the_wire(reference.answers(make_questions(6)))


@pytest.mark.parametrize(
    ("prefill", "decode", "overlap_tokens"),
    [((1, 2), (1, 1), 0), ((1, 1), (1, 2), 0), ((1, 2), (2, 2), 2)],
    ids=str,
)
async def test_every_width_gives_the_same_bits(
    checkpoint: Path,
    expected: list[Shown],
    prefill: tuple[int, int],
    decode: tuple[int, int],
    overlap_tokens: int,
) -> None:
    """By (stages, ranks of each); the model has recurrent and attention layers."""
    async with cluster_in_process(
        checkpoint,
        prefill_pp=prefill[0],
        prefill_tp=prefill[1],
        decode_pp=decode[0],
        decode_tp=decode[1],
        chunk_tokens=64,
        overlap_tokens=overlap_tokens,
    ) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in make_questions(6))
        )
        assert [shown(completion) for completion in completions] == expected
        workers = {worker.role: worker for worker in (await client.cluster_status()).workers}
        assert (workers["prefill"].tensor_size, workers["decode"].tensor_size) == (
            prefill[1],
            decode[1],
        )


async def test_a_layer_of_two_halves_is_sent_when_both_have_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half needs more exchanges: it adds up its products on one rank each. So the second
    half is the first to compute a layer."""
    hidden_size = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    lengths = (30, 120, 80)  # the first one may be computed alone
    monkeypatch.setattr(linear, "SHARED_OUT_BYTES", 100 * hidden_size * 4)
    questions = [
        replace(question, prompt_token_ids=(*question.prompt_token_ids, *range(3, 123))[:length])
        for question, length in zip(make_questions(3), lengths, strict=True)
    ]
    expected = on_the_wire(Reference(checkpoint).answers(questions))
    async with cluster_in_process(
        checkpoint, prefill_tp=2, chunk_tokens=256, overlap_tokens=2, prefix_cache=False
    ) as client:
        for _ in range(8):
            answers = await asyncio.gather(
                *(client.complete(as_query(question), timeout_s=60) for question in questions)
            )
            assert [shown(answer) for answer in answers] == expected


async def test_data_ranks_give_the_same_bits_and_show_their_load(
    checkpoint: Path, expected: list[Shown]
) -> None:
    """Each has requests, pages and slots of its own; on both sides of the handoff, in stages of
    other widths."""
    async with cluster_in_process(
        checkpoint,
        prefill_tp=2,
        prefill={"dp_attention": 2},
        decode_pp=2,
        decode_tp=4,
        decode={"dp_attention": 2},
        chunk_tokens=64,
    ) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in make_questions(6))
        )
        assert [shown(completion) for completion in completions] == expected
        for worker in (await client.cluster_status()).workers:
            assert len(worker.data_ranks) == 2
            assert worker.pages_free == sum(rank.pages_free for rank in worker.data_ranks)
            assert worker.running_requests == sum(
                rank.running_requests for rank in worker.data_ranks
            )


@pytest.mark.parametrize("family", ["llama_tied_bias", "qwen3_moe"])
async def test_four_ranks_divide_odd_vocabularies_widths_and_experts(
    tmp_path: Path, family: str
) -> None:
    """257 tokens, 104 inner values and five experts: `baton check` accepts them, and the pools
    serve."""
    model = make_checkpoint(tmp_path, family)
    assert read_model(model).facts.vocab_size % 4
    assert next(report(WorkerConfig(model=model, world_size=4, tp=4, num_pages=8)))
    questions = make_questions(3)
    right = on_the_wire(Reference(model).answers(questions))
    async with cluster_in_process(model, prefill_tp=2, decode_tp=4) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in questions)
        )
        assert [shown(completion) for completion in completions] == right


@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, 3), (2, 3)), ((2, 2), (1, 1)), ((1, 2), (1, 3))], ids=str
)
async def test_ranks_divide_three_heads_of_keys_unevenly(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    """By (stages, ranks of each)."""
    model = make_checkpoint(tmp_path, "llama_nine_heads", dtype=torch.bfloat16)
    questions = make_questions(3)
    right = on_the_wire(Reference(model).answers(questions))
    async with cluster_in_process(
        model,
        prefill_pp=prefill[0],
        prefill_tp=prefill[1],
        decode_pp=decode[0],
        decode_tp=decode[1],
        chunk_tokens=64,
    ) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in questions)
        )
    assert [shown(completion) for completion in completions] == right


@pytest.mark.parametrize("dp_attention", [1, 2])
async def test_a_draft_runs_on_the_sampling_stage(
    checkpoint: Path, expected: list[Shown], tmp_path: Path, dp_attention: int
) -> None:
    """Its state of the prompt is handed over between the first ranks of the last stages, or of
    their data ranks."""
    draft = save_draft(tmp_path / "eagle3", layers=(0, 1, 3))
    async with cluster_in_process(
        checkpoint,
        prefill_tp=2,
        decode_pp=2,
        decode_tp=2,
        decode={"dp_attention": dp_attention},
        draft=draft,
        spec_topk=4,
        spec_steps=3,
        spec_draft_tokens=8,
    ) as client:
        completions = await asyncio.gather(
            *(client.complete(as_query(question), timeout_s=60) for question in make_questions(6))
        )
        assert [shown(completion) for completion in completions] == expected
