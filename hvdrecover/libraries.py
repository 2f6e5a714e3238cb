"""Telling a library's Python code from the user's own."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.fspath(Path(__file__).parent),
)
_BELOW = tuple({path + os.sep for each in _FOLDERS for path in (each, os.path.realpath(each))})


def is_library(file: str) -> bool:
    """Return whether a file of Python code is not the user's own; also code that is in no file.

    Args:
        file: as Python names it, or where that leads to.
    """
    return file.startswith(("<", *_BELOW))


def place(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error came through, or an empty string."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found
