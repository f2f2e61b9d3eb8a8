"""Adapters in whole clusters of processes: as models of the HTTP API, and while a worker dies."""

import asyncio
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import openai
import torch

from baton.cluster_config import demo_model
from baton.values import ChatMessage, Query, Sampling, Stop
from tests.cluster.test_death import survive
from tests.support.cluster.clusters import running_cluster
from tests.support.cluster.questions import as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import make_checkpoint

QUESTION = "Count from 3 by 2."


async def test_adapters_are_models_over_http(tmp_path: Path) -> None:
    """The gateway asks for the adapter: its answers are those of gRPC, with any number of
    routers."""
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, demo_model(), seed=seed, lora_alpha=60)
    models = ["model", "model:one", "model:two"]
    async with running_cluster(
        demo_model(), aggregated=True, routers=2, adapters=tmp_path, http="127.0.0.1:0"
    ) as running:
        expected = [
            await running.client.complete(
                Query(
                    (ChatMessage("user", QUESTION),),
                    Sampling(temperature=0),
                    Stop(max_tokens=8),
                    model=model,
                ),
                timeout_s=60,
            )
            for model in models
        ]
        assert len({answer.text for answer in expected}) == len(models)
        async with openai.AsyncOpenAI(
            base_url=f"http://{running.cluster.http_address}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
        ) as client:
            assert sorted([model.id async for model in client.models.list()]) == models
            for model, answer in zip(models, expected, strict=True):
                for _ in range(3):  # more than there are routers
                    got = await client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": QUESTION}],
                        temperature=0,
                        max_tokens=8,
                    )
                    assert got.choices[0].message.content == answer.text
                    assert got.model == model
        await operate(str(running.cluster.address), tmp_path)
        await running.until_clean()


async def operate(router: str, folder: Path) -> None:
    """List, load and unload adapters as an operator does, while the cluster serves."""
    shutil.copytree(folder / "one", folder / "three")
    for arguments, states in (
        ((), ["one loaded", "two loaded"]),
        (("--load", "three"), ["three loaded"]),
        (("--unload", "one"), ["one retired"]),
        ((), ["one retired", "three loaded", "two loaded"]),
    ):
        code, lines = await baton("adapters", "--target", router, *arguments)
        assert code == 0
        assert [" ".join(line.split()[2:4]).rstrip(",") for line in lines] == states
        assert all(line.endswith(" MiB, 0 requests") for line in lines)
    code, lines = await baton("adapters", "--target", router, "--load", "four", "--json")
    assert code == 1
    assert ["four has no adapter_config.json" in json.loads(line)["error"] for line in lines] == [
        True
    ]


async def baton(*arguments: str) -> tuple[int | None, list[str]]:
    """Run the command; return its exit code and its lines."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode().splitlines()


async def test_a_killed_rank_changes_no_bit_of_a_mix_of_adapters(tmp_path: Path) -> None:
    """The rank that starts again loads the adapters in another order than the other rank did, and
    they exchange the sums of one adapter after another."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    names = ("one", "two", "three")
    for seed, name in enumerate(names):
        write_adapter(tmp_path / "all" / name, model, seed=seed)
    shutil.copytree(tmp_path / "all", tmp_path / "adapters")
    shutil.rmtree(tmp_path / "adapters" / "one")  # loaded last, and first by name
    async with running_cluster(model, decode_tp=2, adapters=tmp_path / "adapters") as running:
        shutil.copytree(tmp_path / "all" / "one", tmp_path / "adapters" / "one")
        code, _ = await baton("adapters", "--target", running.cluster.address, "--load", "one")
        assert code == 0
        questions = [
            replace(question, adapter=(*names, "")[place % 4], max_tokens=40)
            for place, question in enumerate(make_questions(12, seed=12, max_prompt=60))
        ]
        reference = Reference(model, adapters=tmp_path / "all")
        expected = on_the_wire(reference.answers(questions))
        await survive(running, "decode-0.1", questions, expected, after_s=0.2)
        again = [
            replace(question, request_id=f"again-{question.request_id}") for question in questions
        ]
        answers = await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in again)
        )
        assert [shown(answer) for answer in answers] == expected
        await running.until_clean()


async def test_a_killed_stage_changes_no_bit_of_an_adapter(tmp_path: Path) -> None:
    """More adapters are asked for than fit in memory, so stages load and drop them all the time."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    names = ("one", "", "two", "three", "four", "five")
    for seed, name in enumerate(name for name in names if name):
        write_adapter(tmp_path / "all" / name, model, seed=seed, rank=32)
    shutil.copytree(tmp_path / "all", tmp_path / "adapters")
    shutil.rmtree(tmp_path / "adapters" / "five")
    questions = [
        replace(question, adapter=names[place % len(names)])
        for place, question in enumerate(make_questions(12, seed=11, max_prompt=250, max_tokens=60))
    ]
    expected = on_the_wire(Reference(model, adapters=tmp_path / "all").answers(questions))
    known = [place for place, question in enumerate(questions) if question.adapter != "five"]
    async with running_cluster(
        model, decode_pp=2, adapters=tmp_path / "adapters", worker_flags=("--adapters-mb", "1")
    ) as running:
        await survive(
            running,
            "decode-0.1",
            [questions[place] for place in known],
            [expected[place] for place in known],
            after_s=0.5,
        )
        shutil.copytree(tmp_path / "all" / "five", tmp_path / "adapters" / "five")
        code, _ = await baton("adapters", "--target", running.cluster.address, "--load", "five")
        assert code == 0
        again = [
            replace(question, request_id=f"again-{question.request_id}") for question in questions
        ]
        answers = await asyncio.gather(
            *(running.client.complete(as_query(question), timeout_s=60) for question in again)
        )
        assert [shown(answer) for answer in answers] == expected
        await running.until_clean()
