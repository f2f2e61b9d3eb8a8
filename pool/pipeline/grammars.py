"""Grammars between the stages of a pool: their messages, and the check that compiles them."""

from typing import Protocol

from protos import types_pb2 as pb
from runtime.grammar import Grammar, GrammarKind

NO_GRAMMARS = "needs a model with a tokenizer and an end-of-sequence token"


def grammar_from_proto(message: pb.StructuredOutput) -> Grammar | None:
    kind = message.WhichOneof("grammar")
    return None if kind is None else Grammar.of(GrammarKind(kind), getattr(message, kind))


def grammar_to_proto(grammar: Grammar) -> pb.StructuredOutput:
    return pb.StructuredOutput(**{grammar.kind: grammar.text})


class GrammarCheck(Protocol):
    """A check that compiles grammars for the stage that samples."""

    async def check(self, grammar: Grammar) -> None:
        """Compile a grammar, as `runtime.grammar.checking.Grammars.check`."""
        ...
