"""Writer of docs/third-party.md: the packages that Baton installs, and their licenses.

Run `python -m tools.notices` in an environment with all extras that run without a GPU, after a
change of the dependencies. Names and licenses are what the packages' own metadata state.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "third-party.md"
# The extras that are installed without a GPU and are not for development.
EXTRAS = ("ucx", "vllm", "http", "zmq", "gguf", "redis", "plot", "otel")

_HEAD = """# Third-party packages

<!-- Made by `python -m tools.notices` from the metadata of the installed packages. -->

Baton contains no code of other projects. These packages are installed with it and its extras (`{extras}`),
on Linux without a GPU. The license is what a package's own metadata states. Its text is in the package's `*.dist-info`
folder, in the image too. The extra `gpu` adds FlashInfer and NVIDIA's compiler under their own terms.

| package | license |
|---|---|
"""
_CLASSIFIER = "License :: OSI Approved :: "


def requirements() -> list[Requirement]:
    """Return what the project and its extras require, without the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = list(project["dependencies"])
    for extra in EXTRAS:
        stated += project["optional-dependencies"][extra]
    return [each for each in map(Requirement, stated) if each.name != project["name"]]


def packages(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """Return the installed packages of requirements, and of theirs, by canonical name.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, Distribution] = {}
    pending = list(wanted)
    while pending:
        requirement = pending.pop()
        extras = requirement.extras or {""}
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = distribution(name)
            pending += _required(found[name], requirement.extras)
    return dict(sorted(found.items()))


def _required(package: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    for text in package.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            requirement.marker = None
            yield requirement


def license_of(package: Distribution) -> str:
    """Return the license that the metadata state: an expression, a short text, or classifiers."""
    stated_as = package.metadata.json
    stated = str(stated_as.get("license_expression") or stated_as.get("license") or "")
    if stated and len(stated) < 120:
        return re.sub(r"\s+", " ", stated)
    classifiers = package.metadata.get_all("Classifier") or []
    found = [each.removeprefix(_CLASSIFIER) for each in classifiers if each.startswith(_CLASSIFIER)]
    return ", ".join(found) or "see the package"


def page() -> str:
    """Return the page."""
    rows = "".join(
        f"| {package.metadata['Name']} | {license_of(package)} |\n"
        for package in packages(requirements()).values()
    )
    return _HEAD.format(extras="`, `".join(EXTRAS)) + rows


if __name__ == "__main__":
    try:
        PAGE.write_text(page())
    except PackageNotFoundError as error:
        raise SystemExit(f"tools.notices: {error}") from error
