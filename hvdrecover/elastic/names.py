"""Names that a State has beyond Horovod's, and that scripts for Horovod may want for attributes of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.errors import ConfigError

Result = TypeVar("Result")

HOROVODS = frozenset(
    {
        "check_host_updates",
        "commit",
        "on_hosts_updated",
        "on_reset",
        "register_reset_callbacks",
        "reset",
        "restore",
        "save",
        "sync",
    }
)
"""What Horovod's states have, too; no attribute can have such a name."""

_TAKES: dict[str, tuple[type, ...]] = {
    "checkpoint": (Checkpoint, str),
    "rng": (str,),
    "guard": (Guard,),
    "tensorboard": (str,),
}


class Yielding(Generic[Result]):
    """A property that makes way: a script that sets an attribute of its name has its own.

    Args:
        find: finds the value, given the object.
    """

    def __init__(self, find: Callable[[Any], Result]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __get__(self, holder: Any, owner: type | None = None) -> Result:
        return self._find(holder)


def divide(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell our keywords from attributes of a script that have their names, by the values.

    Args:
        keywords: what was given for each of our keywords; None if nothing.

    Returns:
        Our keywords, None where the script means another thing by the name; and its attributes.
    """
    theirs = {
        name: value
        for name, value in keywords.items()
        if value is not None and not isinstance(value, _TAKES[name])
    }
    return {name: None if name in theirs else value for name, value in keywords.items()}, theirs


def nothing() -> None:
    """Do nothing."""


def is_ours(thing: Any) -> bool:
    """Return whether a class or a method is of this package."""
    return str(thing.__module__).startswith("hvdrecover.")


def yielding(kind: type) -> set[str]:
    """Return the public names of a class of states that are neither Horovod's nor the script's own."""
    ours = filter(is_ours, kind.__mro__)
    return {name for base in ours for name in vars(base) if not name.startswith("_")} - HOROVODS


def refuse_private(kind: type, ours: type) -> None:
    """Refuse a script's class that has, for something else, what one of ours has for itself.

    Args:
        kind: the script's.
        ours: the class of ours that it is derived from.

    Raises:
        ConfigError: a private name of ours is defined anew.
    """
    private = {name for name in vars(ours) if name.startswith("_") and not name.endswith("__")}
    for base in kind.__mro__:
        if not is_ours(base) and (both := private & vars(base).keys()):
            raise ConfigError(
                f"{base.__name__}.{min(both)}", "a state has this name for itself; choose another"
            )


def make_way(state: Any, names: set[str]) -> None:
    """Have a state find its tracked attributes under names that its class has for something else."""
    if names:
        kind = type(state)
        found = {
            name: property(lambda self, name=name: self._contents.values[name])  # type: ignore[misc]
            for name in names
        }
        state.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **found})
