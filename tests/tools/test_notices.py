"""The page of third-party packages has all that the project requires, with the licenses they state."""

import re

from tools.notices import PAGE, packages, requirements

ROW = re.compile(r"^\| (\S+) \| (.+) \|$", re.MULTILINE)


def test_every_required_package_is_on_the_page_with_a_license() -> None:
    listed = dict(ROW.findall(PAGE.read_text()))
    required = {each.name.lower().replace("_", "-") for each in requirements()}
    assert required <= {name.lower().replace("_", "-") for name in listed}
    assert "see the package" not in listed.values()


def test_packages_of_packages_are_found() -> None:
    found = packages(requirements())
    assert {"torch", "sympy", "mpmath", "huggingface-hub", "libucx-cu13"} <= found.keys()
