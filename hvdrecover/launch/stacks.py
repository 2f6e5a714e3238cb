"""Find the place of a training process in its code, and describe stalls."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from hvdrecover.config import STACKS_SIGNAL
from hvdrecover.launch import waits
from hvdrecover.uncaught import is_library

_LISTED = 3  # tensors that a message lists
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


def stall(missing: Mapping[int, Sequence[str]], seconds: float) -> str:
    parts = []
    for rank, names in sorted(missing.items()):
        shown, hidden = ", ".join(names[:_LISTED]), len(names) - _LISTED
        more = f" and {hidden} more" if hidden > 0 else ""
        have = "has" if len(names) == 1 else "have"
        parts.append(f"{shown}{more} {have} waited {seconds:.0f} s for rank {rank}")
    return "; ".join(parts)


def take(process: int, written: int) -> str:
    """Ask a process for its stacks, and return them; '' if it does not answer."""
    before = os.fstat(written).st_size
    os.kill(process, STACKS_SIGNAL)
    deadline = time.monotonic() + waits.STACKS
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(written).st_size
        if now > before and now == size:  # the answer is complete
            return os.pread(written, now - before, before).decode(errors="replace")
        size = now
    return ""


def summary(stacks: str) -> str:
    """Return the main thread's innermost frame, the user's own if possible, as ``file:line in f``, or ''."""
    main = next((each for each in _THREADS.split(stacks) if each.startswith("Current thread")), stacks)
    frames = list(_FRAME.finditer(main))
    if not frames:
        return ""
    frame = next((each for each in frames if not is_library(each["file"])), frames[0])
    return f"{frame['file']}:{frame['line']} in {frame['function']}"
