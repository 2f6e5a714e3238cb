"""The sentences of the package's errors, as its source says them.

`python -m tests.unit.sentences` writes them to `tests/golden/errors.txt`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

import hvdrecover
from hvdrecover import errors

GOLDEN = Path(__file__).parents[1] / "golden" / "errors.txt"
_PACKAGE = Path(hvdrecover.__file__).parent
_HEAD = """\
What hvdrecover's errors say: each sentence once, below its class and the first file that says it. Braces hold
facts. `python -m tests.unit.sentences` writes this file, and tests/unit/test_errors.py compares it."""
_BUILT_IN = "Errors of Python's: most become a part of one of the above"
_DEEP = 5  # names and functions followed, from where an error is made to where its words are
_WIDTH = 116
_FACT = re.compile(r'{[^{}":]*}')
_SAID = re.compile(r"[a-z']+ [a-z']+")  # two words in a row: more than another error's text, passed on

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sentence(NamedTuple):
    """A sentence that one place in the package can say."""

    kind: str
    text: str
    file: str


class _Place(NamedTuple):
    """An expression, the statement or call that uses it, and the function that it is in."""

    value: ast.expr
    use: ast.AST
    within: Function | None


def golden() -> str:
    """Return the text that the golden file must have."""
    said: dict[str, dict[str, str]] = {name: {} for name in [*_own(), _BUILT_IN]}
    for kind, text, file in sentences():
        said[kind if kind in said else _BUILT_IN].setdefault(text, file)
    parts = [_HEAD]
    for kind, texts in said.items():
        if texts:
            about = f": {(_own()[kind].__doc__ or '').splitlines()[0]}" if kind in _own() else ""
            parts += ["", f"## {kind}{about}"]
        file = ""
        for text, where in texts.items():
            parts += [*(["", where] if where != file else []), *_shown(text)]
            file = where
    return "\n".join(parts) + "\n"


@cache
def sentences() -> list[Sentence]:
    """Return what each place that makes an error can say, but for those that pass another's words on."""
    found = []
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.name != "errors.py":
            source = _Source(ast.parse(path.read_text()))
            for kind, text in source.said():
                if _SAID.search(words(text)):
                    found.append(Sentence(kind, text, str(path.relative_to(_PACKAGE))))
    return found


def words(text: str) -> str:
    """Return a sentence with nothing in the place of its facts."""
    return _FACT.sub("", text).strip()


def stands(error: Exception) -> bool:
    """Return whether what an error says is one of the sentences of its class, with facts in it."""
    patterns = (_FACT.split(each.text) for each in sentences() if each.kind == type(error).__name__)
    return any(re.fullmatch(".*".join(map(re.escape, each)), str(error), re.DOTALL) for each in patterns)


def _own() -> dict[str, type[errors.HvdrecoverError]]:
    kinds = (each for each in vars(errors).values() if isinstance(each, type))
    return {each.__name__: each for each in kinds if issubclass(each, errors.HvdrecoverError)}


def _shown(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines()):
        first, then = ("- ", "  ") if number == 0 else ("    ", "    ")
        yield textwrap.fill(
            line.strip(), _WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False
        )


@dataclass(frozen=True)
class _Source:
    """A file, in which words are followed to the place where an error is made of them."""

    tree: ast.Module

    @cached_property
    def calls(self) -> list[tuple[ast.Call, Function | None]]:
        return list(_calls(self.tree, None))

    @cached_property
    def functions(self) -> dict[str, Function]:
        return {each.name: each for each in ast.walk(self.tree) if isinstance(each, Function)}

    def said(self) -> Iterator[tuple[str, str]]:
        bases = {
            call: base.id
            for each in ast.walk(self.tree)
            if isinstance(each, ast.ClassDef)
            for base in each.bases
            if isinstance(base, ast.Name)
            for call in ast.walk(each)
        }
        for call, within in self.calls:
            kind = bases.get(call, "") if ast.unparse(call.func) == "super().__init__" else _called(call)
            if kind in _own():
                yield from ((kind, text) for text in self._own(_own()[kind], call, within))
            elif re.fullmatch(r"[A-Z]\w*Error", kind) and call.args:
                yield from ((kind, text) for text in self.texts(_Place(call.args[0], call, within)))

    def _own(
        self, kind: type[errors.HvdrecoverError], call: ast.Call, within: Function | None
    ) -> Iterator[str]:
        """Return what an error says, made by its own class."""
        made = inspect.signature(kind.__init__)
        given = made.bind(
            None, *call.args, **{each.arg: each.value for each in call.keywords if each.arg}
        ).arguments
        del given[next(iter(given))]
        values = [each[0] if isinstance(each, tuple) else each for each in given.values()]
        for texts in product(*(self.texts(_Place(each, call, within)) for each in values)):
            wanted = (str(made.parameters[name].annotation) for name in given)
            yield str(kind(*map(_as_wanted, texts, wanted)))

    def texts(self, place: _Place, deep: int = _DEEP) -> list[str]:
        """Return what an expression can say, with facts in braces."""
        match place.value:
            case ast.Constant(value=text):
                return [str(text)]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, place, deep)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                joined = self._joined([left, right], place, deep)
                return joined if re.search("[a-z]", words(joined[0])) else [_fact(place.value)]
            case ast.IfExp(body=left, orelse=right):
                return [
                    text for each in (left, right) for text in self.texts(place._replace(value=each), deep)
                ]
            case ast.FormattedValue(value=inner) | ast.List(elts=[inner]) | ast.ListComp(elt=inner):
                return self.texts(place._replace(value=inner), deep)
        followed = self._followed(place) if deep else ()
        texts = list(dict.fromkeys(text for each in followed for text in self.texts(each, deep - 1)))
        said = any(" " in words(each) for each in texts)
        return [each for each in texts if each != "{…}"] if said else [_fact(place.value)]

    def _joined(self, parts: list[ast.expr], place: _Place, deep: int) -> list[str]:
        return [
            "".join(each)
            for each in product(*(self.texts(place._replace(value=part), deep) for part in parts))
        ]

    def _followed(self, place: _Place) -> Iterator[_Place]:
        """Return what a name was set to, a parameter was given, or a function returns."""
        match place.value:
            case ast.Name(id=name):
                assigned = list(_assigned(name, place))
                yield from assigned or _assigned(name, place._replace(within=None), self.tree)
            case ast.Call() as call if _called(call) in self.functions:
                function = self.functions[_called(call)]
                for each in ast.walk(function):
                    if isinstance(each, ast.Return) and each.value:
                        yield _Place(each.value, each, function)


def _calls(node: ast.AST, within: Function | None) -> Iterator[tuple[ast.Call, Function | None]]:
    if isinstance(node, ast.Call):
        yield node, within
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, node if isinstance(node, Function) else within)


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _assigned(name: str, place: _Place, module: ast.Module | None = None) -> Iterator[_Place]:
    """Return what a name is set to, in the block that uses it or in the function, and what is appended."""
    scope = module or place.within
    nodes = list(ast.iter_child_nodes(scope) if module else ast.walk(scope)) if scope else []
    found: list[ast.Assign | ast.NamedExpr] = []
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.NamedExpr(target=ast.Name(id=target)):
                found += [node] if target == name else []
            case ast.Call(args=[appended]) if ast.unparse(node.func) == f"{name}.append":
                yield _Place(appended, node, place.within)
    blocks = [block for each in nodes for block in (getattr(each, "body", 0), getattr(each, "orelse", 0))]
    for block in reversed([each for each in blocks if isinstance(each, list)]):
        here = [each for each in found if each in block]
        if here and any(place.use in ast.walk(each) for each in block):
            found = here
            break
    yield from (_Place(each.value, each, place.within) for each in found if ast.unparse(each.value) != "[]")


def _as_wanted(text: str, annotation: str) -> str | list[str] | dict[str, str]:
    if annotation.startswith("list"):
        return [text]
    return {"{commit}": text} if annotation.startswith("Mapping") else text


def _fact(node: ast.expr) -> str:
    """Return a short name for a fact in braces: the last name in its expression."""
    names = re.findall(r"[a-z]\w*", ast.unparse(node).lower())
    return "{" + (names[-1].rstrip("_") if names else "…") + "}"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
