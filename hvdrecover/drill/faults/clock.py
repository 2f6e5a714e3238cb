"""Faults of the clock."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover import config
from hvdrecover.drill.faults.fault import Drilled, Plain
from hvdrecover.errors import DrillError

_SOURCE = Path(__file__).with_name("clock.c")
_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True)
class ClockJump(Plain):
    """The wall clock of all processes of the run jumps, and jumps back in the end.

    The machine's own clock is not touched: a small library, compiled for the drill and preloaded into the
    run's processes, tells them another time. The monotonic clock and the times of files stay what they are.
    Nothing is to come of it: training continues, no process is killed, and no step is repeated.

    Attributes:
        seconds: by which the clock jumps ahead, or back if negative.
    """

    name: ClassVar[str] = "clock-jump"
    summary: ClassVar[str] = "the wall clock jumps, and jumps back"
    lasting: ClassVar[bool] = True

    seconds: float = 3600.0

    def lacks(self, run: Drilled) -> str:
        """Return whether the library can be compiled, and preloaded from where it will be."""
        if _compiler() is None:
            return "a C compiler; on Debian and Ubuntu: apt-get install gcc libc6-dev"
        if set(" :") & set(os.fspath(run.folder)):
            return f"a path without spaces and colons, unlike '{run.folder}'; name another by --output"
        return ""

    def prepare(self, run: Drilled) -> dict[str, str]:
        """Compile the library, and have it preloaded.

        Raises:
            DrillError: it can't be compiled.
        """
        compiler = _compiler()
        library, offset = run.folder / "clock.so", run.folder / "clock"
        command = [compiler or _COMPILERS[0], "-O2", "-shared", "-fPIC", "-o", os.fspath(library)]
        done = subprocess.run([*command, os.fspath(_SOURCE), "-ldl"], capture_output=True, text=True)
        if done.returncode:
            raise DrillError(os.fspath(_SOURCE), f"it can't be compiled: {done.stderr.strip()}")
        offset.write_bytes(struct.pack("q", 0))
        preloaded = [os.fspath(library), *config.environment().get("LD_PRELOAD", "").split(":")]
        return {"LD_PRELOAD": ":".join(filter(None, preloaded)), "HVDRECOVER_DRILL_CLOCK": os.fspath(offset)}

    def strike(self, run: Drilled, rank: int) -> None:
        """Set the clock."""
        self._set(run, self.seconds)

    def end(self, run: Drilled) -> None:
        """Set it right."""
        self._set(run, 0.0)

    def _set(self, run: Drilled, seconds: float) -> None:
        with (run.folder / "clock").open("r+b", buffering=0) as file:  # in place, for it is mapped
            file.write(struct.pack("q", round(seconds * 1e9)))


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)
