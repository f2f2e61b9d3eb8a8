"""Docstrings and comments are written in the field's plain English.

ruff's D401 holds the mood of first verbs; here are the words that it cannot know.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture.source import PRODUCT, ROOT, is_generated, modules

# A function's docstring says what the function does, so it does not begin with a noun or a clause.
NOT_VERBS = frozenset(
    "a all an any as at both by each either every for from how if in it its likewise none nothing "
    "of on one so some that the these they this those to until what when where whether which who "
    "whom whose with".split()
)
UNCLEAR = frozenset("anew lest nobody somebody thereof whereupon whoever whom".split())
MAX_TEST_NAME = 70  # a line of pytest's report with the path of the file
SPELLINGS = {
    r"(de)?tokenis": "tokenize",
    r"(de)?quantis": "quantize",
    r"serialis": "serialize",
    r"summaris": "summarize",
    r"normalis": "normalize",
    r"initialis": "initialize",
    r"recognis": "recognize",
    r"behaviour": "behavior",
    r"colour": "color",
    r"neighbour": "neighbor",
}
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def first_word(text: str) -> str:
    found = re.match(r"\W*(\w*)", text)
    return found[1].lower() if found else ""


def product() -> dict[str, ast.Module]:
    return {name: tree for name, tree in modules(*PRODUCT).items() if not is_generated(name)}


def prose_of(source: str) -> str:
    """Return the docstrings and comments of a module."""
    texts = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""')))
    ]
    return "\n".join(texts)


def sources() -> Iterator[tuple[str, str]]:
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.relative_to(ROOT)), path.read_text()


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    wrong = [
        f"{name}.{node.name}: {docstring.splitlines()[0]}"
        for name, tree in product().items()
        for node in functions(tree)
        if (docstring := ast.get_docstring(node)) and first_word(docstring) in NOT_VERBS
    ]
    assert wrong == []


def test_unclear_words_are_not_used() -> None:
    pattern = re.compile(rf"\b({'|'.join(UNCLEAR)})\b", re.IGNORECASE)
    wrong = [
        f"{name}: {word}" for name, text in sources() for word in pattern.findall(prose_of(text))
    ]
    wrong += [
        f"{page.relative_to(ROOT)}: {word}"
        for page in PAGES
        for word in pattern.findall(page.read_text())
    ]
    assert wrong == []


def test_names_of_tests_are_short_and_clear() -> None:
    names = {
        node.name
        for tree in modules("tests").values()
        for node in functions(tree)
        if node.name.startswith("test_")
    }
    assert [name for name in names if len(name) > MAX_TEST_NAME] == []
    assert [name for name in names if UNCLEAR & set(name.split("_"))] == []


@pytest.mark.parametrize(("pattern", "instead"), SPELLINGS.items(), ids=SPELLINGS.values())
def test_words_are_spelled_as_in_the_field(pattern: str, instead: str) -> None:
    found = re.compile(pattern, re.IGNORECASE)
    texts = [*sources(), *((str(page.relative_to(ROOT)), page.read_text()) for page in PAGES)]
    assert [name for name, text in texts if found.search(text)] == [], instead


def test_the_first_word_is_found() -> None:
    assert first_word("`Return` it.") == "return"
    assert first_word("") == ""
