"""The public names of the package, read from its source: no framework is imported for that."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "hvdrecover": "hvdrecover",
    "hvdrecover.torch": "torch",
    "hvdrecover.tensorflow": "tensorflow",
    "hvdrecover.tensorflow.keras": "keras",
    "hvdrecover.discovery": "discovery",
    "hvdrecover.errors": "errors",
}
"""Package or module: its page in docs/api."""


def names(package: str) -> list[str]:
    """Return the names in ``__all__``, or without that the public classes and functions that stand there."""
    body = _tree(package).body
    for node in body:
        if isinstance(node, ast.Assign) and _assigned(node) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in defined if not name.startswith("_")]


def page(package: str) -> str:
    """Return the page of a package."""
    return (ROOT / "docs" / "api" / f"{PAGES[package]}.md").read_text()


def listed(package: str) -> list[str]:
    """Return the package's names that have an entry in its page; all of them have if it has one itself."""
    if re.search(rf"^::: {re.escape(package)}$", page(package), re.MULTILINE):
        return names(package)
    return re.findall(rf"^::: {re.escape(package)}\.(\w+)$", page(package), re.MULTILINE)


def home(package: str, name: str) -> str:
    """Return the module that defines a public name."""
    for node in _tree(package).body:
        if isinstance(node, ast.ImportFrom) and name in (each.asname or each.name for each in node.names):
            module = str(node.module)
            return f"{module}.{name}" if _file(f"{module}.{name}").exists() else module
    return package


def docstring(module: str, name: str) -> str:
    """Return what a module says of a class, a function, an assigned name, or of itself as ``name``."""
    body = _tree(module).body
    for place, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and _assigned(node) == name and place + 1 < len(body):
            return ast.get_docstring(ast.Module(body[place + 1 :], [])) or ""
    return ast.get_docstring(_tree(module)) or ""


def undocumented(package: str, name: str) -> list[str]:
    """Return the public name and its public methods, as far as they have no docstring."""
    module = home(package, name)
    found = [node for node in _tree(module).body if getattr(node, "name", "") == name]
    methods = [
        child
        for node in found
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.FunctionDef)
        and not child.name.startswith("_")
        and not any("setter" in ast.unparse(each) for each in child.decorator_list)
    ]
    lacking = [each.name for each in methods if ast.get_docstring(each) is None]
    return lacking if docstring(module, name) else [name, *lacking]


def examples(package: str, name: str) -> list[doctest.Example]:
    """Return the examples in a public name's docstring."""
    return doctest.DocTestParser().get_examples(docstring(home(package, name), name))


def is_module(name: str) -> bool:
    """Return whether the package has a module of this name."""
    return _file(name).exists()


def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text())


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _assigned(node: ast.Assign) -> str:
    return getattr(node.targets[0], "id", "")
