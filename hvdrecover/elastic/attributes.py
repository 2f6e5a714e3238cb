"""The attributes of a state under their names, and the methods that a script's class may have its own of.

A script for Horovod may call an attribute as `State` calls something that Horovod's has not: ours makes way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.scalars.trackers import Tracker
from hvdrecover.errors import ConfigError
from hvdrecover.guard.settings import Guard

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
"""Names of Horovod's states; no attribute can have one."""

_TAKES: dict[str, tuple[type, ...]] = {
    "checkpoint": (Checkpoint, str),
    "rng": (str,),
    "guard": (Guard,),
    "tensorboard": (str,),
    "tracker": (Tracker,),
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


class Attributes:
    """The base of `State`: what it has by names that the script chooses."""

    _contents: Contents

    def _begin(self, attributes: Mapping[str, Any], ours: type) -> set[str]:
        """Look at the names of a new state.

        Args:
            attributes: to be tracked.
            ours: the class of ours that the state's is derived from.

        Returns:
            The names that no attribute can have.

        Raises:
            ConfigError: the script's class has a private name of ours for something else.
        """
        refuse_private(type(self), ours)
        for name in attributes:
            vars(self).pop(name, None)  # a subclass may have set it before it called this
        self._due: dict[str, Callable[[], object]] = {}
        self._before = frozenset(vars(self))
        return set(dir(type(self))) - yielding(type(self))

    def _make_way(self) -> None:
        """Take all names that the state has by now for itself, and give up those of tracked attributes."""
        kind, names = type(self), yielding(type(self)) & self._contents.values.keys()
        if names:
            found = {name: property(functools.partial(_tracked, name=name)) for name in names}
            self.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **found})
        self._taken = frozenset(vars(self).keys() - self._before)

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found otherwise, so tracked attributes live in one place.
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.values:
            return contents.values[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.values:
            contents.put(name, value)
        elif name in self.__dict__.get("_taken", ()):
            raise ConfigError(f"state.{name}", "the state has this name for itself; choose another")
        else:
            object.__setattr__(self, name, value)

    def _around(self, verb: Literal["save", "restore", "sync"], ours: Callable[[], object]) -> None:
        """Call a method that a subclass may have its own of; ``super()`` in there does ``ours``, but once.

        If a subclass does not call ``super()``, ours follows its own.
        """
        self._due[verb] = ours
        try:
            getattr(self, verb)()
            self._due.pop(verb, nothing)()
        finally:
            self._due.pop(verb, None)


def _tracked(state: Attributes, name: str) -> Any:
    return state._contents.values[name]


def divide(**keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
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
    """Return the public names of a class of states that make way for an attribute, as in Horovod's states.

    They are ours that Horovod's states have not, and the script's own, such as a default; not a property,
    which an attribute can't take the place of.
    """
    found = ((name, value) for base in kind.__mro__ for name, value in vars(base).items())
    public = {name for name, value in found if not name.startswith("_") and not hasattr(value, "__set__")}
    return public - HOROVODS


def refuse_private(kind: type, ours: type) -> None:
    """Refuse a script's class that has, for something else, what one of ours has for itself.

    Args:
        kind: the script's.
        ours: the class of ours that it is derived from.

    Raises:
        ConfigError: a private name of ours is defined anew.
    """
    names = {name for base in ours.__mro__ for name in vars(base)}
    private = {name for name in names if name.startswith("_") and not name.endswith("__")}
    for base in kind.__mro__:
        if not is_ours(base) and (both := private & vars(base).keys()):
            raise ConfigError(
                f"{base.__name__}.{min(both)}", "a state has this name for itself; choose another"
            )


def kept_elsewhere(kind: type) -> str | None:
    """Return a line on what durable commits of a class lack, if it keeps something by itself."""
    own = [f"{verb}()" for verb in ("save", "restore") if not is_ours(getattr(kind, verb))]
    if not own:
        return None
    return (
        f"{kind.__name__} has its own {' and '.join(own)}: what it keeps there by itself is not "
        "part of durable commits; pass that to the state's constructor by name"
    )
