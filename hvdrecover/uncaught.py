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

from hvdrecover import config, error_kinds
from hvdrecover.errors import ConfigError

_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.fspath(Path(__file__).parent),
)
_BELOW = tuple({path + os.sep for each in _FOLDERS for path in (each, os.path.realpath(each))})
_PATIENCE = 5.0  # seconds for the process to end; then it shows its error itself

_notes: int | None = None
_hook: object = None  # the last hook that was set here


def report_to(notes: int) -> None:
    """Report the error that ends this process to a guardian, and let the guardian print it.

    If the script or a library has set ``sys.excepthook``, that hook is called, and prints the error.

    Args:
        notes: the file descriptor of the notes, which the guardian reads.
    """
    global _notes, _hook
    _notes = notes
    if sys.excepthook is _hook:
        return
    previous, process = sys.excepthook, os.getpid()
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
    kinds = error_kinds.kinds(error)
    text = _short(error) if kinds and not _shows_all() else ""
    text = text or "".join(traceback.format_exception(error))
    short = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SyntaxError):  # which names file and line by itself
        short = f"{type(error).__name__}: {error}"
    where = place(error) or "".join(f"{each.filename}:{each.lineno}" for each in _frames(error)[-1:])
    identity = f"{type(error).__qualname__} at {where}"  # texts vary: process ids, addresses, generations
    return _write(error=short, identity=identity, traceback=text, kinds=kinds, unprinted=not printed)


def _shows_all() -> bool:
    try:
        return config.read().log == "debug"
    except ConfigError:
        return False


def _short(error: BaseException) -> str:
    """Return the text of an error of hvdrecover, with only the script's lines of the traceback.

    Its message names cause and remedy, so our own frames would only hide them. Returns '', which asks for the
    whole traceback, if no line is the script's, or if an exception in the script's code caused the error.
    """
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    own, of_cause = (
        [frame for frame in _frames(each) if not is_library(frame.filename)] for each in (error, cause)
    )
    if not own or of_cause:
        return ""
    lines = [
        "Traceback (most recent call last; HVDRECOVER_LOG=debug shows all of it):\n",
        *traceback.format_list(own),
        *traceback.format_exception_only(error),
    ]
    return "".join(lines)


def _frames(error: BaseException | None) -> list[traceback.FrameSummary]:
    return [] if error is None else list(traceback.extract_tb(error.__traceback__))


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
    """Return whether Python code is not the user's own; also true for code without a file.

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
