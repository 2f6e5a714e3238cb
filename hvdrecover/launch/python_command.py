"""Taking a command apart that runs a Python program; a pure function."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

EARLY = Path(__file__).parent / "early"  # the folder of our `sitecustomize`
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?")
_ISOLATED = re.compile(r"-[^-WX]*[EIS].*")  # no environment variables, or no site
_FLAGS = re.compile(r"-[^-WXcm]*(?P<last>[WXcm])(?P<value>.*)")  # several in a word; these take what follows


@dataclass(frozen=True)
class PythonCommand:
    interpreter: tuple[str, ...]  # the interpreter with its own options
    module: bool  # whether the program is a module (``-m``), else it is a file
    program: str  # the module or file
    arguments: tuple[str, ...]  # the program's arguments

    @property
    def customizes(self) -> bool:
        """Whether the interpreter runs the `sitecustomize` that it finds by ``PYTHONPATH``."""
        return not any(_ISOLATED.fullmatch(word) for word in self.interpreter[1:])


def parse(command: Sequence[str]) -> PythonCommand | None:
    """Take a command apart; None if it does not run a Python program from a file or a module."""
    if not command or not _INTERPRETER.fullmatch(PurePath(command[0]).name):
        return None
    place = 1
    while place < len(command):
        word = command[place]
        if word == "-m" and place + 1 < len(command):
            return PythonCommand(
                tuple(command[:place]), True, command[place + 1], tuple(command[place + 2 :])
            )
        if not word.startswith("-"):
            return PythonCommand(tuple(command[:place]), False, word, tuple(command[place + 1 :]))
        flags = _FLAGS.fullmatch(word)
        if word in ("-", "--") or (flags and flags["last"] in "cm"):
            return None
        place += 2 if word == "--check-hash-based-pycs" or (flags and not flags["value"]) else 1
    return None


def early_environment(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make Python run our `sitecustomize` first.

    It reports errors that come before hvdrecover is imported.
    """
    program = parse(command)
    if program is None or not program.customizes:
        return {}
    path = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(EARLY), *([path] if path else [])])}
