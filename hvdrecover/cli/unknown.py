"""Refuse unknown options before anything starts, and suggest the one that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn


def left_over(words: Sequence[str]) -> list[str]:
    """Return what of some words is not an option of ``horovodrun``, nor its value.

    A wrong value ends this process with 2, as it would end ``horovodrun``.
    """
    horovodrun = _horovodrun()
    if not words or horovodrun is None:
        return []
    found, others = horovodrun.parse_known_args(["-np", "1", *words])
    return [*others, *found.command]


def refuse(parser: argparse.ArgumentParser, words: Sequence[str], *, with_horovodrun: bool) -> NoReturn:
    """Exit with 2, and name the option that was meant.

    Args:
        parser: of the command.
        words: unknown ones, an option first.
        with_horovodrun: whether the command takes the options of ``horovodrun``, too.
    """
    horovodrun = _horovodrun() if with_horovodrun else None
    known = [*_options(parser), *(_options(horovodrun) if horovodrun is not None else [])]
    meant = difflib.get_close_matches(words[0].partition("=")[0], known, 1)
    hint = f"; did you mean {meant[0]}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


class _MadeError(Exception):
    """The parser was made, and is about to read this process's arguments."""


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *_: Any, **__: Any) -> NoReturn:
        raise _MadeError(self)


def _horovodrun() -> argparse.ArgumentParser | None:
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
