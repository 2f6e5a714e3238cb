"""Names and numbers for the classes of errors, by which one process reports its error to others."""

from __future__ import annotations

from hvdrecover import errors
from hvdrecover.errors import HvdrecoverError, StoppedError, StorageError


def kinds(error: BaseException) -> list[str]:
    """Return the names of an error's class and its base classes, the most specific first."""
    own = type(error)
    classes = [
        # A `StoppedError` reports the error of another rank.
        *(_named().get(error.kind, own).__mro__ if isinstance(error, StoppedError) else ()),
        *own.__mro__,
    ]
    names = [each.__name__ for each in classes if issubclass(each, HvdrecoverError)]
    if isinstance(error, StorageError) and error.__cause__ is not None:
        names += [each.__name__ for each in type(error.__cause__).__mro__]
    return list(dict.fromkeys(names))


def number(error: HvdrecoverError | None) -> int:
    """Return a number for an error's class, the same on all ranks; 0 for no error."""
    return 0 if error is None else 1 + sorted(_named()).index(type(error).__name__)


def name(number: int) -> str:
    return sorted(_named())[number - 1]


def _named() -> dict[str, type[HvdrecoverError]]:
    own = (each for each in vars(errors).values() if isinstance(each, type))
    return {each.__name__: each for each in own if issubclass(each, HvdrecoverError)}
