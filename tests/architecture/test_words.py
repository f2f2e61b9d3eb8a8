"""One word per thing: class names, the glossary, and the case ids in names of tests."""

import ast
import re
from collections import defaultdict

from tests.architecture.source import PRODUCT, ROOT, modules

# One thing that two packages which must not import each other both have a class for.
SAME_THING = {
    "FinishReason": ("baton.values", "engine.core.request"),
    "TokenLogprobs": ("baton.values", "engine.core.request"),
}
CASE_ID = re.compile(r"s[0-4]_[0-9]+")


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    twice = {name: tuple(sorted(found)) for name, found in places.items() if len(found) > 1}
    assert twice == SAME_THING


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
