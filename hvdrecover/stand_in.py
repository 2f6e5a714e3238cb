"""Modules that stand in for Horovod's: what is not ours is Horovod's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def standing_in(
    horovods: ModuleType, ours: Mapping[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's ``__getattr__`` and ``__dir__``, by which it has all that a module of Horovod's has.

    Args:
        horovods: the module of Horovod's.
        ours: ``globals()`` of the module that stands in for it; what it defines itself comes first.
    """

    def find(name: str) -> Any:
        try:
            return getattr(horovods, name)
        except AttributeError:
            message = f"neither {ours['__name__']} nor {horovods.__name__} has an attribute '{name}'"
            raise AttributeError(message) from None

    def names() -> list[str]:
        return sorted({*ours, *dir(horovods)})

    return find, names
