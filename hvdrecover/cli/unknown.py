"""Options of ``horovodrun``; unknown options are refused before anything starts."""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn


def left_over(words: Sequence[str]) -> list[str]:
    """Return what of some words is not an option of ``horovodrun``, nor its value.

    A wrong value ends this process with 2, as it would end ``horovodrun``.
    """
    known = horovodrun()
    if not words or known is None:
        return []
    found, others = known.parse_known_args(["-np", "1", *words])
    return [*others, *found.command]


def refuse(parser: argparse.ArgumentParser, words: Sequence[str], *, with_horovodrun: bool) -> NoReturn:
    """Exit with 2, and name the option that was meant.

    Args:
        parser: of the command.
        words: unknown ones, an option first.
        with_horovodrun: whether the command takes the options of ``horovodrun``, too.
    """
    others = horovodrun() if with_horovodrun else None
    known = [*_options(parser), *(_options(others) if others is not None else [])]
    meant = difflib.get_close_matches(words[0].partition("=")[0], known, 1)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def values(word: str, parsers: Sequence[argparse.ArgumentParser]) -> int:
    """Return how many words after an option are its values; 0 if it has its value in itself, or is unknown.

    Args:
        word: the option, as it was typed.
        parsers: those that may know it, before ``horovodrun``'s own.
    """
    known = [action for parser in parsers for action in parser._actions if word in action.option_strings]
    if not known and "=" not in word and (others := horovodrun()) is not None:
        known = [action for action in others._actions if word in action.option_strings]
    nargs = known[0].nargs if known else 0
    return 1 if nargs is None else nargs if isinstance(nargs, int) else 0


class ByHorovodrun(argparse.Action):
    """An option with which ``horovodrun`` says something, and starts nothing."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **{**rest, "nargs": 0})

    def __call__(self, *_: Any) -> NoReturn:
        """Let it."""
        launch: Any = importlib.import_module("horovod.runner.launch")
        sys.argv[1:] = [self.option_strings[-1]]
        launch.run_commandline()
        sys.exit()


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


class _MadeError(Exception):
    """The parser was made, and is about to read this process's arguments."""


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *_: Any, **__: Any) -> NoReturn:
        raise _MadeError(self)


def horovodrun() -> argparse.ArgumentParser | None:
    """Return ``horovodrun``'s own parser, which its function makes and uses at once; None without Horovod."""
    try:
        launch: Any = importlib.import_module("horovod.runner.launch")
    except ImportError:
        return None
    launch.argparse = SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})
    try:
        launch.parse_args()
    except _MadeError as made:
        parser: argparse.ArgumentParser = made.args[0]
        return parser
    finally:
        launch.argparse = argparse
    return None
