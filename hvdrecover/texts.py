"""What people are shown: texts that are safe in a terminal, and the script's line that raised an error."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.fspath(Path(__file__).parent),
)
_BELOW = tuple({path + os.sep for each in _FOLDERS for path in (each, os.path.realpath(each))})


def printable(text: str, keep: str = "") -> str:
    """Escape control and bidirectional characters, which move the cursor or turn a line; not ``keep``."""
    shown = (each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)
    return "".join(shown)


def is_library(file: str) -> bool:
    """Return whether a file belongs to a library, or is the name of code without a file (``<string>``)."""
    return file.startswith(("<", *_BELOW))


def script_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error came through, or an empty string."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return found
