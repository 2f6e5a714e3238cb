"""Faults of training data."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, Plain
from hvdrecover.drill.faults.processes import kill_all
from hvdrecover.errors import DrillError

_BLOCK = 1 << 12  # bytes at the start of the file, which are inverted


@dataclass(frozen=True)
class DataChanged(Plain):
    """A file of the training data is changed and grows, and all training processes are killed.

    A script that hands its data to the state is stopped by `DataChangedError`, which names the file, on all
    ranks, and continues when the old data are back; with ``data_changed="warn"`` or ``"restart_epoch"`` it
    continues at once, and says so. A script that does not, trains on with the new data without a word.
    """

    name: ClassVar[str] = "data-changed"
    summary: ClassVar[str] = "training data are changed, and all training processes are killed"
    lasting: ClassVar[bool] = True
    may_stop: ClassVar[bool] = True

    def lacks(self, run: Drilled) -> str:
        """Return whether there are data to change."""
        if run.data is None:
            return "training data that may be changed; have the script read a copy, and name it by --data"
        return ""

    def strike(self, run: Drilled, rank: int) -> None:
        """Change the largest file.

        Raises:
            DrillError: there is no file.
        """
        file = _largest(run)
        old = _kept(run)
        if not old.exists():  # else it is changed already
            shutil.copy2(file, old)
        with file.open("r+b") as changed:
            block = changed.read(_BLOCK)
            changed.seek(0)
            changed.write(bytes(byte ^ 0xFF for byte in block))
            changed.seek(0, os.SEEK_END)
            changed.write(block or b"\0")
        kill_all(run)

    def end(self, run: Drilled) -> None:
        """Put the old file back, with its times."""
        if _kept(run).exists():
            _kept(run).replace(_largest(run))


def _kept(run: Drilled) -> Path:
    """Return where the old file is meanwhile; out of what the script may read."""
    assert run.data is not None
    return run.data.with_name(f"{run.data.name}.before")


def _largest(run: Drilled) -> Path:
    """The largest file of the data, the same one before and after it has grown."""
    assert run.data is not None
    files = [run.data] if run.data.is_file() else [path for path in run.data.rglob("*") if path.is_file()]
    if not files:
        raise DrillError(os.fspath(run.data), "the training data have no file that could be changed")
    return max(sorted(files), key=lambda path: path.stat().st_size)
