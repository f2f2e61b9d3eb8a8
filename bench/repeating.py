"""Prompts whose answers repeat them, and others, from texts that every Python has: its own modules."""

import argparse
import contextlib
import functools
import heapq
import inspect
import json
import random
import textwrap
from collections.abc import Iterator
from types import ModuleType

from baton.values import ChatMessage, Prompt
from demo.corpus import COLORS, NAMES, PLACES, THINGS, VERBS, Fact

# Functions of about forty lines.
_FUNCTIONS = (
    heapq.nsmallest,
    textwrap.shorten,
    heapq.merge,
    heapq.nlargest,
    textwrap.dedent,
    textwrap.indent,
    json.dumps,
    functools.total_ordering,
    contextlib.contextmanager,
    inspect.getmodule,
    inspect.cleandoc,
    json.load,
)
_MODULES: tuple[ModuleType, ...] = (
    heapq,
    textwrap,
    json,
    argparse,
    inspect,
    contextlib,
    functools,
    random,
)
KINDS = ("edits", "quotes", "json", "schema", "turns", "chat", "random")
# The schema of "schema".
FACTS = json.dumps(
    {
        "type": "array",
        "minItems": 6,
        "maxItems": 6,
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["person", "verb", "color", "thing", "place"],
            "properties": {
                name: {"type": "string", "maxLength": 30}
                for name in ("person", "verb", "color", "thing", "place")
            },
        },
    }
)
MAX_TEXT_CHARS = 1500
_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "How do I learn to play the piano?",
    "What is the difference between a virus and a bacterium?",
    "Give me three ideas for dinner.",
    "Explain how a bicycle stays upright.",
    "What should I see in Rome in two days?",
    "Describe the water cycle.",
)


def prompts(kind: str, count: int, *, vocab_size: int, seed: int = 0) -> list[Prompt]:
    """Return prompts of one of `KINDS`.

    edits   a function to be repeated with a change
    quotes  a text to be quoted
    json    sentences to be repeated as JSON
    schema  the same, for answers that follow the schema `FACTS`
    turns   the second turn of a chat about its first answer
    chat    questions whose answers repeat nothing
    random  random tokens
    """
    rng = random.Random(f"{seed} {kind}")
    if kind == "random":
        return [tuple(rng.randrange(3, vocab_size) for _ in range(128)) for _ in range(count)]
    made = _endless(kind, rng)
    return [next(made) for _ in range(count)]


def _endless(kind: str, rng: random.Random) -> Iterator[Prompt]:
    texts = [inspect.getsource(function) for function in _FUNCTIONS]
    manuals = [inspect.getdoc(module) or "" for module in _MODULES]
    while True:
        if kind == "edits":
            code = rng.choice(texts)[:MAX_TEXT_CHARS]
            name = rng.choice(NAMES).lower()
            yield _asked(f"Rename the function to {name} and repeat the whole code:\n\n{code}")
        elif kind == "quotes":
            text = rng.choice(manuals)[:MAX_TEXT_CHARS]
            yield _asked(f"Quote the most important sentences of this text word by word:\n\n{text}")
        elif kind in ("json", "schema"):
            facts = "\n".join(_fact(rng).sentence() for _ in range(6))
            yield _asked(
                f"Extract person, verb, color, thing and place of each line as a JSON list of "
                f"objects:\n\n{facts}"
            )
        elif kind == "turns":
            facts = " ".join(_fact(rng).sentence() for _ in range(8))
            yield (
                ChatMessage("user", "Tell me a story."),
                ChatMessage("assistant", facts),
                ChatMessage("user", "Repeat the story, and put each sentence on its own line."),
            )
        else:
            yield _asked(rng.choice(_QUESTIONS))


def _asked(text: str) -> Prompt:
    return (ChatMessage("user", text),)


def _fact(rng: random.Random) -> Fact:
    return Fact(*(rng.choice(values) for values in (NAMES, VERBS, COLORS, THINGS, PLACES)))
