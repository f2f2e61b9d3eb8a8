"""Grammar of a request, and the checks of its size and shape that need no compilation."""

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
MAX_SCHEMA_VALUES = 20_000  # objects, lists and their members
MAX_PROPERTIES = 2_000  # sum over all objects of a schema
MAX_REPETITIONS = 10_000  # in one {m,n} of an expression, and the product of nested ones
MAX_LENGTH = 1_000_000  # of minItems, maxLength and similar keywords
# Limit of text from a client or the library in an error.
MAX_SHOWN_CHARACTERS = 160

OPTIONS = "x-guidance"
_FLEXIBLE = "whitespace_flexible"
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
    # Excluded from repr: it is client data and long, so it must not reach a log line.
    encoded: bytes = declared(repr=False)

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
        """Return the name of the request field that contains the grammar."""
        return f"structured_output.{self.kind}"

    @property
    def digest(self) -> bytes:
        """Return a short identifier of the grammar."""
        return hashlib.blake2b(self.encoded, digest_size=16, person=self.kind.encode()).digest()

    def refused(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(FieldViolation(self.field, problem))


def check_shape(grammar: Grammar) -> None:
    """Raise InvalidRequestError for a grammar that is too large, too deep or not JSON.

    The error names field and limit. Takes milliseconds at most.
    """
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
    """Return the parsed schema. Raises InvalidRequestError if it is not a JSON object."""
    try:
        schema = json.loads(grammar.text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise grammar.refused(f"is not JSON: {shown(str(error))}") from None
    if not isinstance(schema, dict):
        raise grammar.refused("must be a JSON object")
    return schema


def _finite(number: str) -> float:
    """Parse a number of a schema. Raises ValueError if it is not finite.

    The compiler would read null in its place.
    """
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


def shown(text: str, limit: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return the beginning of a text of unknown origin, printable and on one line."""
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
    """Return whether whitespace between JSON tokens is allowed.

    A schema sets this in the compiler's own options.
    """
    options = schema.get(OPTIONS)
    return not isinstance(options, dict) or options.get(_FLEXIBLE) is not False


def _option_problems(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the options of the compiler that clients may not set.

    Some make it ignore keywords that it cannot enforce, or accept more than JSON.
    """
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
    """Return the deepest nesting of brackets outside strings.

    Works without recursion, and for text that is not JSON.
    """
    deepest = depth = 0
    for bracket in re.findall(r'"(?:\\.|[^"\\])*"?|[\[{]|[\]}]', text, re.DOTALL):
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def _regex_problems(text: str, what: str) -> Iterator[str]:
    """Yield the limits that an expression breaks.

    Nested repetition counts multiply: `(a{99}){99}` has 9,801.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_REGEX_BYTES:
        yield f"{what}has {size} bytes, the limit of an expression is {MAX_REGEX_BYTES}"
        return
    largest = _repetitions(text)
    if largest > MAX_REPETITIONS:
        yield f"{what}repeats something {largest} times, the limit is {MAX_REPETITIONS}"


def _repetitions(text: str) -> int:
    """Return the largest product of nested repetition counts; * and + count as one.

    The result is arbitrary for a text that is not an expression.
    """
    groups = [1]  # per open group: the largest product within it so far
    # `last` belongs to the item that a repetition would repeat
    last = 1
    largest = 1
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
