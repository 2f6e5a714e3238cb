"""The names of classes in commits. To find one, nothing is imported, and no code of a module runs."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover.errors import UnsupportedValueError


def name_of(kind: type, path: str) -> str:
    """Return the name under which a class is found again.

    Args:
        kind: the class.
        path: what the value of that class is called in an error.

    Raises:
        UnsupportedValueError: it can't be found by its name.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise UnsupportedValueError(
            path, f"the class {name} can't be found by its name. Define it at the top level of a module."
        )
    return name


def _find(name: str) -> Any:
    """The class ``module:Outer.Inner`` if its module is imported, else None. Runs no module's code."""
    module_name, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = _attributes(found).get(part)
    return found if isinstance(found, type) else None


def _attributes(holder: Any) -> Mapping[str, Any]:
    """Return what a module or a class defines, unnoticed by a lazy module or a metaclass."""
    if issubclass(type(holder), types.ModuleType):
        return typing.cast(dict[str, Any], object.__getattribute__(holder, "__dict__"))
    return type.__getattribute__(holder, "__dict__") if issubclass(type(holder), type) else {}


def find(name: str, fits: Callable[[type], bool]) -> Any:
    """Return the class of a name, of a kind that ``fits``.

    Raises:
        ValueError: this program doesn't define it, or it doesn't fit.
    """
    kind = _find(name)
    if kind is None or not fits(kind):
        raise ValueError(
            f"this program does not define the class {name}; import or define it before resuming"
        )
    return kind
