"""One word per thing: class names, the glossary, and the case ids in names of tests."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.architecture.source import PRODUCT, ROOT, modules

# One thing that two packages which must not import each other both have a class for.
SAME_THING = {
    "FinishReason": ("baton.values", "engine.core.request"),
    "TokenLogprobs": ("baton.values", "engine.core.request"),
}
ALIAS_NAME = re.compile(r"_*[A-Z]\w*[a-z]\w*")
ALIAS_FORMS = (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)
CASE_ID = re.compile(r"s[0-4]_[0-9]+")


def test_no_class_name_has_two_meanings() -> None:
    """Leading underscores do not tell names apart, and an alias is a name as a class is.

    One alias in several modules is one thing if its definition is the same.
    """
    classes: dict[str, list[str]] = defaultdict(list)
    aliases: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(module)
        for name, definition in _aliases(tree):
            aliases[name.lstrip("_")].add(definition)
    twice = {name: tuple(sorted(found)) for name, found in classes.items() if len(found) > 1}
    assert twice == SAME_THING
    assert {name: found for name, found in aliases.items() if len(found) > 1} == {}
    assert aliases.keys() & classes.keys() == set()


def test_aliases_of_every_form_are_found() -> None:
    tree = ast.parse(
        "Emit = Callable[[int], None]\n"
        "_Event = Started | Failed\n"
        "Place: TypeAlias = int\n"
        "Later: typing.TypeAlias = 'Sooner'\n"
        "Error = errors.BatonError\n"
        "LIMIT = A | B\n"
        "T = TypeVar('T')\n"
        "number = table[0]\n"
    )
    assert [name for name, _ in _aliases(tree)] == ["Emit", "_Event", "Place", "Later", "Error"]


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the type aliases of a module as (name, definition), by their form or their case."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                if ALIAS_NAME.fullmatch(name) and isinstance(value, ALIAS_FORMS):
                    yield name, ast.unparse(value)
            case ast.AnnAssign(
                target=ast.Name(name), annotation=annotation, value=ast.expr() as value
            ):
                if ast.unparse(annotation).rpartition(".")[2] == "TypeAlias":
                    yield name, ast.unparse(value)
            case _ if type(node).__name__ == "TypeAlias":  # `type X = ...`, from Python 3.12 on
                name, _, definition = ast.unparse(node).removeprefix("type ").partition(" = ")
                yield name.partition("[")[0], definition


def test_every_case_id_in_a_name_is_explained() -> None:
    explained = set(
        re.findall(r"^\| (S[0-4]-[0-9]+) \|", (ROOT / "docs/upstream.md").read_text(), re.MULTILINE)
    )
    used = {
        found.upper().replace("_", "-") for tree in modules("tests").values() for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for found in CASE_ID.findall(node.name)
    }  # fmt: skip
    assert used <= explained
    assert explained - used <= {"S1-9"}, "a case without a test"


def test_every_name_of_the_glossary_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    glossary = page.split("## Glossary")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\|(.*)\|$", glossary, re.MULTILINE)
    named = {name for row in rows for name in re.findall("`(.+?)`", row)}
    known = {
        node.name for tree in modules(*PRODUCT).values() for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }  # fmt: skip
    assert len(named) > 15
    assert named <= known


def test_the_page_names_only_files_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    folders = "baton|bench|decode|docs|engine|models|pool|prefill|router|runtime|tests|transfer"
    paths = re.findall(rf"`((?:{folders})/[\w./]*)`", page)
    assert len(paths) > 30
    assert [path for path in paths if "FAMILY" not in path and not (ROOT / path).exists()] == []
