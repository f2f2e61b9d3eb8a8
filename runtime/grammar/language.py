"""A grammar as a request brings it, and what is refused by its size and shape alone, before
anything is compiled."""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as declared
from enum import StrEnum
from typing import Any

from runtime.errors import FieldViolation, InvalidRequestError

MAX_GRAMMAR_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 14  # of a regular expression, and of each pattern in a schema
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 20_000  # objects, lists and what they hold
MAX_PROPERTIES = 2_000  # of all objects of a schema together
MAX_REPETITIONS = 10_000  # in one {m,n} of an expression, and in its nested ones multiplied
MAX_LENGTH = 1_000_000  # minItems, maxLength and their like
MAX_SHOWN_CHARACTERS = (
    160  # of anything that came from a client or the library and goes into an error
)

OPTIONS, _FLEXIBLE = "x-guidance", "whitespace_flexible"
_COUNTS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_ITEM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


class GrammarKind(StrEnum):
    """Values are the fields of `StructuredOutput` in protos/baton/v1/types.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"


@dataclass(frozen=True)
class Grammar:
    """A constraint on a whole output, from its first token to its end.

    `encoded` is the text in UTF-8, where a lone surrogate is encoded like any other code point
    (WTF-8). Raises ValueError for other bytes.
    """

    kind: GrammarKind
    encoded: bytes = declared(
        repr=False
    )  # belongs to a client, and is long: it is never part of a log line

    def __post_init__(self) -> None:
        self.encoded.decode("utf-8", "surrogatepass")

    @classmethod
    def of(cls, kind: GrammarKind, text: str) -> "Grammar":
        """Return the grammar with this text."""
        return cls(kind, text.encode("utf-8", "surrogatepass"))

    @property
    def text(self) -> str:
        """Return the text as the client sent it."""
        return self.encoded.decode("utf-8", "surrogatepass")

    @property
    def field(self) -> str:
        """The field of a request that has it."""
        return f"structured_output.{self.kind}"

    @property
    def digest(self) -> bytes:
        """Names it where the text would be too long."""
        return hashlib.blake2b(self.encoded, digest_size=16, person=self.kind.encode()).digest()

    def refused(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(FieldViolation(self.field, problem))


def check_shape(grammar: Grammar) -> None:
    """Raises InvalidRequestError, naming field and limit, for a grammar that is too large, too deep
    or no JSON. Takes milliseconds at most."""
    size = len(grammar.encoded)
    if size > MAX_GRAMMAR_BYTES:
        raise grammar.refused(f"has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}")
    problems = (
        _regex_problems(grammar.text, "")
        if grammar.kind is GrammarKind.REGEX
        else _schema_problems(grammar)
    )
    for problem in problems:
        raise grammar.refused(problem)


def schema_of(grammar: Grammar) -> dict[str, Any]:
    """Raises InvalidRequestError for a schema that is not a JSON object."""
    try:
        schema = json.loads(grammar.text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise grammar.refused(f"is not JSON: {shown(str(error))}") from None
    if not isinstance(schema, dict):
        raise grammar.refused("must be a JSON object")
    return schema


def _finite(number: str) -> float:
    """The compiler would read null instead of what has no end. Raises ValueError."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is no finite number")
    return value


def shown(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """The beginning of a text of unknown origin, printable, on one line."""
    cut = text[:limit]
    printable = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in cut
    )
    return printable[:limit] + "…" * (len(text) > limit or len(printable) > limit)


def _schema_problems(grammar: Grammar) -> Iterator[str]:
    depth = _nesting(grammar.text)
    if depth > MAX_SCHEMA_DEPTH:
        yield f"is nested {depth} deep, the limit is {MAX_SCHEMA_DEPTH}"
        return
    schema = schema_of(grammar)
    yield from _option_problems(schema)
    num_values = num_properties = 0
    open_values: list[Any] = [schema]
    while open_values:
        value = open_values.pop()
        num_values += 1
        if isinstance(value, list):
            open_values.extend(value)
        elif isinstance(value, dict):
            open_values.extend(value.values())
            for name in ("properties", "patternProperties"):
                members = value.get(name)
                num_properties += len(members) if isinstance(members, dict) else 0
            yield from _keyword_problems(value)
    if num_values > MAX_SCHEMA_VALUES:
        yield f"has {num_values} values, the limit is {MAX_SCHEMA_VALUES}"
    if num_properties > MAX_PROPERTIES:
        yield f"has {num_properties} properties, the limit is {MAX_PROPERTIES}"


def whitespace_is_flexible(schema: dict[str, Any]) -> bool:
    """Return whether whitespace may stand between tokens of JSON, as a schema may say in the
    compiler's own options."""
    options = schema.get(OPTIONS)
    return not isinstance(options, dict) or options.get(_FLEXIBLE) is not False


def _option_problems(schema: dict[str, Any]) -> Iterator[str]:
    """The compiler has options by which it ignores keywords that it cannot enforce, or leaves JSON:
    they are not for clients."""
    options = schema.get(OPTIONS, {})
    if not isinstance(options, dict) or any(
        name != _FLEXIBLE or not isinstance(value, bool) for name, value in options.items()
    ):
        yield f"{OPTIONS} may have {_FLEXIBLE}, true or false, and nothing else"


def _keyword_problems(value: dict[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        count = value.get(name)
        if isinstance(count, int | float) and not abs(count) <= MAX_LENGTH:
            yield f"{name} must be at most {MAX_LENGTH}"
    if isinstance(pattern := value.get("pattern"), str):
        yield from _regex_problems(pattern, "pattern ")
    if isinstance(patterns := value.get("patternProperties"), dict):
        for pattern in patterns:
            yield from _regex_problems(pattern, "pattern ")


def _nesting(text: str) -> int:
    """The deepest nesting of brackets outside strings; found without recursion, also where it is no
    JSON."""
    deepest = depth = 0
    for bracket in re.findall(r'"(?:\\.|[^"\\])*"?|[\[{]|[\]}]', text, re.DOTALL):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def _regex_problems(text: str, what: str) -> Iterator[str]:
    """Repetition counts multiply where they nest: `(a{99}){99}` has 9,801."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_REGEX_BYTES:
        yield f"{what}has {size} bytes, the limit of an expression is {MAX_REGEX_BYTES}"
        return
    largest = _repetitions(text)
    if largest > MAX_REPETITIONS:
        yield f"{what}repeats something {largest} times, the limit is {MAX_REPETITIONS}"


def _repetitions(text: str) -> int:
    """The largest product of nested repetition counts; * and + count once. Anything of a text that
    is no expression."""
    groups = [1]  # per open group: the largest product within it so far
    last, largest = 1, 1  # `last`: of the item that a repetition would repeat
    for found in _ITEM.finditer(text):
        token = found.group()
        if token == "(":
            groups.append(1)
            last = 1
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif found.group(1):
            last *= max(_count(found.group(1)), _count(found.group(2)), 1)
            groups[-1] = max(groups[-1], last)
            largest = max(largest, last)
        elif token not in "*+?)":
            last = 1
    return largest


def _count(digits: str | None) -> int:
    if not digits:
        return 0
    return MAX_LENGTH if len(digits) > len(str(MAX_LENGTH)) else min(int(digits), MAX_LENGTH)
