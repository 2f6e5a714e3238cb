"""Report the error that ends a process to its guardian, which prints it once, after all other output."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import TracebackType

from hvdrecover import error_kinds

_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.fspath(Path(__file__).parent),
)
_BELOW = tuple({path + os.sep for each in _FOLDERS for path in (each, os.path.realpath(each))})
_PATIENCE = 5.0  # seconds for the process to end; then it shows its error itself

_notes: int | None = None
_hook: object = None  # the last hook that was set here


def report_to(notes: int) -> None:
    """Report the error that ends this process in the notes for the guardian, which prints it."""
    global _notes, _hook
    _notes = notes
    if sys.excepthook is _hook:
        return
    # `hvdrecover.launch.early` has set one that calls this function.
    previous, process = getattr(sys.excepthook, "before", sys.excepthook), os.getpid()
    # A hook of the script or a library prints the error.
    prints = previous is not sys.__excepthook__

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        forked = os.getpid() != process
        if forked or issubclass(kind, KeyboardInterrupt) or not _reported(error, printed=prints) or prints:
            previous(kind, error, trace)
            return
        # The exit may wait for other threads, perhaps forever. The error must be shown anyway.
        late = threading.Timer(_PATIENCE, _show, (previous, kind, error, trace))
        late.daemon = True
        late.start()

    sys.excepthook = _hook = report


def _reported(error: BaseException, *, printed: bool) -> bool:
    text = "".join(traceback.format_exception(error))
    short = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # which names file and line by itself
        short = f"{type(error).__name__}: {error}"
    frames = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    where = place(error) or "".join(frames[-1:])
    identity = f"{type(error).__qualname__} at {where}"  # texts vary: process ids, addresses, generations
    return _write(
        error=short, identity=identity, traceback=text, kinds=error_kinds.kinds(error), unprinted=not printed
    )


def _show(previous: object, *error: object) -> None:
    if _write(unprinted=False) and callable(previous):
        previous(*error)


def _write(**facts: object) -> bool:
    assert _notes is not None
    try:
        os.write(_notes, f"{json.dumps(facts)}\n".encode())
    except (OSError, ValueError):  # a program in between has closed file descriptors that it did not know
        return False
    return True


def is_library(file: str) -> bool:
    """Return whether a code file is not the user's own; also true for code without a file (``<string>``)."""
    return file.startswith(("<", *_BELOW))


def place(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error came through, or an empty string."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return found
