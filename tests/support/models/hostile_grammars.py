"""Grammars that the library alone would compile, or follow, for minutes."""

import json

from runtime.grammar import Grammar, GrammarKind


def schema(value: object) -> Grammar:
    return Grammar.of(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar.of(GrammarKind.REGEX, text)


def never_compiled(name: str = "") -> Grammar:
    """Return 250 bytes whose product of automata has millions of states."""
    return schema(
        {
            "title": name,
            "allOf": [
                {"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)
            ],
        }
    )


def slow_to_follow() -> Grammar:
    """Return 18 KB in which every bracket may begin any of hundreds of lists: it compiles at once,
    but each mask is slow."""
    names = [f"d{number}" for number in range(60)]
    lists = {
        name: {
            "type": "array",
            "items": {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in names[at % 7 :: 7]]},
        }
        for at, name in enumerate(names)
    }
    return schema({"$defs": lists, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]})
