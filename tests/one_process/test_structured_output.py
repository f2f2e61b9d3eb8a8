"""Output under a grammar is the same from every topology, with and without drafts, and always
follows it."""

import asyncio
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.values import Completion, FinishReason, Query, Sampling, Stop, StructuredOutput
from decode import worker
from decode.speculation import VerifiedStep
from decode.suffix_draft import NO_CHAIN, SuffixDraft
from engine.speculative.contracts.config import SUFFIX
from runtime.errors import CapacityError, InvalidRequestError
from runtime.grammar import Grammar, Grammars, process
from tests.support.cluster.one_process import cluster_in_process
from tests.support.drafts.eagle import save_draft
from tests.support.models.guided import write_character_tokenizer
from tests.support.models.hostile_grammars import never_compiled

PATTERN = "(cat|dog)-[0-9]{2,6}( [a-f]+)?!"
SCHEMA = json.dumps(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "on"],
        "properties": {
            "kind": {"enum": ["red", "green"]},
            "on": {"type": "boolean"},
            "more": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
        },
        "x-guidance": {"whitespace_flexible": False},
    }
)
QUERIES = [
    Query(
        (5, 6, 7, 8, 9 + i),
        Sampling(temperature=1.2 * (i % 3), seed=i),
        Stop(max_tokens=120),
        structured_output=StructuredOutput(SCHEMA) if i % 2 else StructuredOutput(regex=PATTERN),
    )
    for i in range(6)
]


@pytest.fixture(scope="module")
def speller(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("speller") / "model"
    shutil.copytree(checkpoint, folder)
    write_character_tokenizer(folder)
    return folder


async def answers(
    model: Path, prefill_pp: int, decode_pp: int, settings: Mapping[str, Any]
) -> list[Completion]:
    async with cluster_in_process(
        model, prefill_pp=prefill_pp, decode_pp=decode_pp, **settings
    ) as client:
        with pytest.raises(InvalidRequestError) as refused:
            await client.complete(
                Query((5,), structured_output=StructuredOutput(regex="(")), timeout_s=60
            )
        assert [violation.field for violation in refused.value.violations] == [
            "structured_output.regex"
        ]
        return list(
            await asyncio.gather(*(client.complete(query, timeout_s=60) for query in QUERIES))
        )


async def test_grammars_hold_and_no_topology_or_draft_changes_the_output(
    speller: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draft = save_draft(tmp_path_factory.mktemp("drafts") / "eagle3", layers=(0, 1, 3))
    expected = await answers(speller, 1, 1, {})
    for query, answer in zip(QUERIES, expected, strict=True):
        assert answer.finish.reason is FinishReason.STOP, (
            "end-of-sequence, as nothing else may follow"
        )
        if query.structured_output == StructuredOutput(regex=PATTERN):
            assert re.fullmatch(PATTERN, answer.text)
        else:
            value = json.loads(answer.text)
            assert value["kind"] in ("red", "green")
            assert value["on"] in (True, False)
            assert set(value.get("more", [])) <= {1, 2}
    topologies: list[tuple[int, int, dict[str, Any]]] = [
        (2, 3, {}),
        (1, 2, {"draft": draft, "spec_topk": 1, "spec_steps": 3, "spec_draft_tokens": 3}),
        (
            2,
            1,
            {
                "draft": draft,
                "spec_topk": 4,
                "spec_steps": 3,
                "spec_draft_tokens": 12,
                "prefill_tp": 2,
                "decode_tp": 2,
                "dp_attention": 2,
            },
        ),
    ]
    for prefill_pp, decode_pp, settings in topologies:
        found = await answers(speller, prefill_pp, decode_pp, settings)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert [answer.text for answer in found] == [answer.text for answer in expected]


@pytest.mark.parametrize("decode_pp", [1, 2])
async def test_what_a_grammar_forces_is_drafted_and_accepted(
    speller: Path, decode_pp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await answers(speller, 1, 1, {})
    steps: list[VerifiedStep] = []
    monkeypatch.setattr(worker, "observe_verified", lambda metrics, step: steps.append(step))
    # No text is drafted, so what is drafted is what grammars force.
    monkeypatch.setattr(SuffixDraft, "propose", lambda *arguments: NO_CHAIN)
    settings = {"draft": SUFFIX, "spec_draft_tokens": 6, "spec_adaptive": False}
    found = await answers(speller, 1, decode_pp, settings)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    num_drafted = sum(step.num_drafted for step in steps)
    assert sum(sum(step.accepted) for step in steps) == num_drafted > 0


async def test_a_grammar_that_never_compiles_is_refused_while_others_are_served(
    speller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage of the pool, which samples, is not the one that receives the request."""
    monkeypatch.setattr(
        process, "MEMORY_BYTES", 1 << 30
    )  # time is to be the limit on a fast core, too
    async with cluster_in_process(speller, prefill_pp=2, decode_pp=2) as client:
        hostile = [
            asyncio.create_task(
                client.complete(
                    Query(
                        (5,), structured_output=StructuredOutput(never_compiled(str(number)).text)
                    ),
                    timeout_s=60,
                )
            )
            for number in range(4)
        ]
        answers = await asyncio.gather(*(client.complete(query, timeout_s=60) for query in QUERIES))
        assert all(answer.finish.reason is FinishReason.STOP for answer in answers)
        for refused in await asyncio.gather(*hostile, return_exceptions=True):
            assert isinstance(refused, InvalidRequestError | CapacityError)
            if isinstance(refused, InvalidRequestError):
                assert "within 1 s of computing, the limit" in str(refused)


@pytest.mark.parametrize("num_evicted", [1, 2])
async def test_a_response_resumes_though_its_grammar_was_evicted(
    speller: Path, monkeypatch: pytest.MonkeyPatch, num_evicted: int
) -> None:
    """As many other grammars may do between the check and the first token, on the prefill worker
    and on the decode worker."""
    query = QUERIES[0]
    check, evicted = Grammars.check, list[Grammars]()

    async def check_and_evict(self: Grammars, grammar: Grammar, client: str = "") -> None:
        await check(self, grammar, client)
        if self._processes and self not in evicted and len(evicted) < num_evicted:
            evicted.append(self)
            self._end([grammar])

    async with cluster_in_process(speller, prefill_pp=1, decode_pp=1) as client:
        expected = await client.complete(query, timeout_s=60)
        monkeypatch.setattr(Grammars, "check", check_and_evict)
        answer = await client.complete(query, timeout_s=60)
    assert len(evicted) == num_evicted
    assert answer.token_ids == expected.token_ids
    assert answer.finish.reason is FinishReason.STOP
