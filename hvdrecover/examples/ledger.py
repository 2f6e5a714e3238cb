"""A record of the samples that each rank trains on, by which tests check that none is lost or repeated."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from hvdrecover.state.state import State


class Ledger:
    """Writes the batches of this process to its own file, a line of JSON for each."""

    def __init__(self, folder: Path | None, state: State) -> None:
        self._folder = folder  # with None, nothing is written
        self._state: Any = state  # its attributes are the script's
        self._file: TextIO | None = None

    def batch(self, rank: int, size: int, indices: Sequence[int]) -> None:
        """Record a batch of the state's epoch, before the commit that makes it count."""
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a", buffering=1)
        last = self._state.last_commit
        when = [time.time(), os.getpid(), rank, size, last.generation, last.commit, self._state.epoch]
        self._file.write(json.dumps([*when, list(indices)]) + "\n")
