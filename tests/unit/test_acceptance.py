"""Acceptance tests: tests/README.md lists all of them by capability, and they use public surfaces only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit import api

TESTS = Path(__file__).parents[1]
# The examples are the jobs that the tests start; tests/support is the one place that may use the harness.
PUBLIC = re.compile(r"hvdrecover\.examples\b")
HARNESS = re.compile(r"hvdrecover\.(examples|launch\.processes|drill|events)\b")
IMPORT = re.compile(r"^\s*(?:from\s+(hvdrecover[\w.]*)\s+)?import\s+(\([^)]*\)|.*)$", re.MULTILINE)
# Helpers of tests that are not marked: these tests look inside.
INSIDE = {"alone.py", "crash_writer.py", "repair_faults.py", "tensorflow_gradients.py"}


@cache
def marked() -> dict[str, list[str]]:
    """Return the marked tests by file, relative to `TESTS`."""
    found = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        of_module = any("acceptance" in ast.unparse(node) for node in body if _assigns(node, "pytestmark"))
        tests = [
            node.name
            for node in body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")
            and (of_module or any("mark.acceptance" in ast.unparse(each) for each in node.decorator_list))
        ]
        if tests:
            found[path.relative_to(TESTS).as_posix()] = tests
    return found


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name


@cache
def capabilities() -> dict[str, list[str]]:
    """Return what tests/README.md names for each capability: ``FILE`` or ``FILE::TEST``."""
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)
    return {capability: re.findall(r"`([\w/]+\.py(?:::\w+)?)`", files) for capability, files in rows}


def files() -> list[str]:
    """Return the files of marked tests, and the modules and scripts that such tests use."""
    folders = ("integration", "lab", "support")
    helpers = (path for folder in folders for path in (TESTS / folder).rglob("*.py"))
    return [
        *marked(),
        *(
            path.relative_to(TESTS).as_posix()
            for path in sorted(helpers)
            if not path.name.startswith("test_") and path.name not in INSIDE
        ),
    ]


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each module of ours that a file imports, and the name taken from it, strings included."""
    for module, names in IMPORT.findall(path.read_text()):
        for each in names.strip("()").split(","):
            name = each.split("#")[0].split(" as ")[0].strip()
            if module and name:
                yield module, name
            elif name.startswith("hvdrecover"):
                yield name, ""


def is_public(module: str, name: str) -> bool:
    """Return whether acceptance tests may import a name, or a module if the name is empty."""
    if PUBLIC.match(module):
        return True
    if module not in {*api.PAGES, "hvdrecover.keras"}:
        return False
    return not name or name in api.names(module) or not api.is_module(f"{module}.{name}")


@pytest.mark.parametrize("file", files())
def test_acceptance_tests_and_their_helpers_import_public_names_only(file: str) -> None:
    private = [
        f"{module} {name}"
        for module, name in _imports(TESTS / file)
        if module.startswith("hvdrecover") and not is_public(module, name)
        if not (file.startswith("support/") and HARNESS.match(module))
    ]
    assert private == []


def test_each_capability_has_a_marked_test() -> None:
    known = {*marked(), *(f"{file}::{test}" for file, tests in marked().items() for test in tests)}
    assert len(capabilities()) > 20
    for capability, named in capabilities().items():
        assert named, capability
        assert [each for each in named if each not in known] == [], capability


def test_each_marked_test_is_listed() -> None:
    listed = {each for named in capabilities().values() for each in named}
    assert [
        f"{file}::{test}"
        for file, tests in marked().items()
        for test in tests
        if not {file, f"{file}::{test}"} & listed
    ] == []
