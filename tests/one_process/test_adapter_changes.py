"""Adapters that are loaded, replaced and unloaded while requests run: nothing is lost, and every answer
has the bits of one version of its adapter."""

import asyncio
import itertools
import shutil
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.adapters import AdapterOnWorker, change_adapters
from baton.client import AsyncBatonClient
from baton.retry import NO_RETRY
from baton.values import Chunk
from engine.core.request import Request
from runtime.errors import UnavailableError, UnknownModelError
from runtime.security.access import ChannelSecurity
from tests.support.cluster.one_process import cluster_in_process
from tests.support.cluster.questions import Shown, as_query, make_questions, on_the_wire, shown
from tests.support.cluster.reference import Reference
from tests.support.models.adapters import write_adapter
from tests.support.models.checkpoints import make_checkpoint

QUESTIONS = make_questions(5, seed=45, max_prompt=150, max_tokens=10)
NUMBERS = itertools.count()
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"prefill_pp": 2, "decode_pp": 3}),
    ("qwen3_5_text", {"prefill_tp": 2, "decode_pp": 2}),
    ("llama", {"worker": {}, "worker_pp": 2, "worker_tp": 2}),
]


def with_adapter(name: str, questions: Sequence[Request] = QUESTIONS) -> list[Request]:
    return [replace(question, adapter=name) for question in questions]


async def ask(client: AsyncBatonClient, questions: Sequence[Request]) -> list[Shown]:
    answers = await asyncio.gather(
        *(
            client.complete(
                as_query(replace(question, request_id=f"r{next(NUMBERS)}")), timeout_s=60
            )
            for question in questions
        )
    )
    return [shown(answer) for answer in answers]


async def change(client: AsyncBatonClient, **changed: str) -> list[AdapterOnWorker]:
    """Change the adapters of all workers, each of which must do it."""
    found = await change_adapters(client.targets[0], ChannelSecurity(), **changed)
    assert [each.error for each in found] == [""] * len(found)
    return found


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
async def test_changes_lose_no_request_and_change_no_bit(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    old, new, folder = (tmp_path / name for name in ("old", "new", "adapters"))
    for seed, path in enumerate((old / "a", new / "a", new / "b")):
        write_adapter(path, model, seed=seed, rank=5 + seed)
    plain = on_the_wire(Reference(model).answers(QUESTIONS))
    first = on_the_wire(Reference(model, adapters=old).answers(with_adapter("a")))
    second = on_the_wire(Reference(model, adapters=new).answers(with_adapter("a")))
    other = on_the_wire(Reference(model, adapters=new).answers(with_adapter("b")))
    shutil.copytree(old, folder)
    wanted: list[list[list[Shown]]] = [[plain], [first]]

    async def stream(client: AsyncBatonClient, which: int) -> int:
        """Ask again and again; return how often."""
        count = 0
        while wanted:
            given = await ask(client, with_adapter("a" if which else ""))
            for answer, *allowed in zip(given, *(wanted or ends)[which], strict=True):
                assert answer in allowed
            count += 1
        return count

    async with cluster_in_process(model, adapters=folder, chunk_tokens=64, **layout) as client:
        assert (await client.model_info()).adapters == ("a",)
        streams = [asyncio.create_task(stream(client, which)) for which in range(2)]
        shutil.copytree(new / "b", folder / "b")
        with pytest.raises(UnknownModelError, match="also with the adapters a, is"):
            await ask(client, with_adapter("b"))
        assert {each.state for each in await change(client, load="b")} == {"loaded"}
        await until_adapters(client, ("a", "b"))
        assert await ask(client, with_adapter("b")) == other
        wanted[1] = [first, second]
        shutil.rmtree(folder / "a")
        shutil.copytree(new / "a", folder / "a")
        await change(client, load="a")
        async with asyncio.timeout(30):
            while await ask(client, with_adapter("a")) != second:
                pass
        states = {(each.name, each.state) for each in await change(client)}
        assert states == {("a", "loaded"), ("a", "retired"), ("b", "loaded")}
        await change(client, unload="b")
        await until_adapters(client, ("a",))
        with pytest.raises(UnknownModelError, match="also with the adapters a, is"):
            await ask(client, with_adapter("b"))
        ends = list(wanted)
        wanted.clear()
        assert min(await asyncio.gather(*streams)) > 0


@pytest.mark.parametrize("num_tokens", [4, 0])
async def test_a_response_resumes_with_the_version_that_it_began_with(
    tmp_path: Path, num_tokens: int
) -> None:
    """Its first router is gone; the next one knows the adapter's new version, and then none.

    Without a token, the client has prompt logprobs of the old version.
    """
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    for seed, version in enumerate(("old", "new")):
        write_adapter(tmp_path / version / "a", model, seed=seed)
    shutil.copytree(tmp_path / "old", tmp_path / "adapters")
    query = as_query(replace(QUESTIONS[0], adapter="a", max_tokens=10))
    query = replace(query, num_prompt_logprobs=None if num_tokens else 0)
    async with cluster_in_process(
        model, adapters=tmp_path / "adapters", decode_pp=2, retry=NO_RETRY
    ) as client:
        whole, began_with = await client.complete(query, timeout_s=60), ""
        async with aclosing(client.generate(query, timeout_s=60)) as events:
            async for event in events:
                if isinstance(event, Chunk) and event.compatibility:
                    began_with = event.compatibility
                    assert bool(event.token_ids) is bool(num_tokens)
                    break
        resumed = replace(
            query, resumed=(whole.token_ids[:num_tokens],), resumed_from=(began_with,)
        )

        async def resumes() -> None:
            again = replace(resumed, request_id=f"r{next(NUMBERS)}")
            rest = await client.complete(again, timeout_s=60)
            assert shown(rest) == shown(whole)[num_tokens:]
            assert rest.prompt_logprobs == whole.prompt_logprobs

        await resumes()
        write_adapter(tmp_path / "adapters" / "a", model, seed=1)
        await change(client, load="a")
        async with asyncio.timeout(30):
            while shown(await client.complete(query, timeout_s=60)) == shown(whole):
                pass
        await resumes()
        await change(client, unload="a")
        await until_adapters(client, ())
        await resumes()
        other = replace(resumed, resumed_from=(f"{began_with[:-1]}?",))
        with pytest.raises(UnavailableError, match="its adapter has changed"):
            await client.complete(other, timeout_s=60)
        with pytest.raises(UnknownModelError, match="is not served"):
            await client.complete(replace(resumed, resumed_from=()), timeout_s=60)


async def until_adapters(client: AsyncBatonClient, names: tuple[str, ...]) -> None:
    """Wait until the router knows what its workers offer now."""
    async with asyncio.timeout(30):
        while (await client.model_info()).adapters != names:
            pass


async def test_more_adapters_than_fit_take_turns_in_memory(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    names = [f"adapter-{number}" for number in range(5)]
    for seed, name in enumerate(names):
        write_adapter(tmp_path / "adapters" / name, model, seed=seed, rank=32)
    reference = Reference(model, adapters=tmp_path / "adapters")
    asked = [with_adapter(name)[place] for place, name in enumerate(names)]
    expected = on_the_wire(reference.answers(asked))
    async with cluster_in_process(
        model, adapters=tmp_path / "adapters", adapters_mb=1, decode_pp=2
    ) as client:
        found = await change(client)
        for address in {each.address for each in found}:
            own = [each for each in found if each.address == address]
            assert [each.name for each in own] == names
            loaded = sum(each.num_bytes for each in own if each.state == "loaded")
            assert 0 < loaded <= 1 << 20 < sum(each.num_bytes for each in own)
        for _ in range(4):
            assert await ask(client, asked) == expected


async def test_an_adapter_that_one_pool_lost_is_named_soon(tmp_path: Path) -> None:
    """Both roles offer it first; prefill still has it when the file of the decode pool is gone."""
    model = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    folders = [tmp_path / role for role in ("prefill", "decode")]
    for seed, name in enumerate("ab"):
        write_adapter(folders[0] / name, model, seed=seed, rank=64)
    shutil.copytree(folders[0], folders[1])
    expected = on_the_wire(Reference(model, adapters=folders[0]).answers(with_adapter("a")))
    async with cluster_in_process(
        model,
        decode_pp=2,
        prefill={"adapters": folders[0], "adapters_mb": 4},
        decode={"adapters": folders[1], "adapters_mb": 1},
    ) as client:
        shutil.rmtree(folders[1] / "b")
        async with asyncio.timeout(10):
            with pytest.raises(UnknownModelError, match="also with the adapters a, is"):
                await ask(client, with_adapter("b")[:1])
            await until_adapters(client, ("a",))
        assert await ask(client, with_adapter("a")) == expected
        shutil.copytree(folders[0] / "b", folders[1] / "b")
        await change(client, load="b")
        await until_adapters(client, ("a", "b"))
        await ask(client, with_adapter("b"))
