"""The stacks of a training process's threads, and the one line that sums them up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

from hvdrecover.config import STACKS_SIGNAL
from hvdrecover.launch import waits
from hvdrecover.libraries import is_library

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S+) \((?P<file>.+):(?P<line>\d+)\)$", re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
_MAIN = re.compile(r'Current thread|Thread .*"MainThread"')


def take(process: int, written: int) -> str:
    """Have a process write down where its threads are; py-spy does, if it is installed and the process can't.

    Args:
        process: the process; it must have imported an adapter.
        written: file descriptor of the memory that it writes to.
    """
    before = os.fstat(written).st_size
    os.kill(process, STACKS_SIGNAL)
    deadline = time.monotonic() + waits.STACKS
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(written).st_size
        if now > before and now == size:  # it has answered, and has come to an end
            return os.pread(written, now - before, before).decode(errors="replace")
        size = now
    return _by_py_spy(process)


def _by_py_spy(process: int) -> str:
    if (program := shutil.which("py-spy")) is None:
        return ""
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(process)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=waits.PY_SPY, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def summary(stacks: str) -> str:
    """The frame that tells most: the innermost of the user's own in the main thread, as ``file:line in f``.

    Args:
        stacks: what `take` gave.

    Returns:
        The frame, or an empty string if there is none.
    """
    main = next((each for each in _THREADS.split(stacks) if _MAIN.match(each)), stacks)
    frames = list(_FRAME.finditer(main)) or list(_PY_SPY_FRAME.finditer(main))
    own = [frame for frame in frames if not _is_library(frame["file"])]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{frame['file']}:{frame['line']} in {frame['function']}"


def _is_library(file: str) -> bool:
    return is_library(file) or is_library(os.path.realpath(file))
