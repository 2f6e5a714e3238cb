"""Jobs of scripts that wait at gates: a rank prints ``gate NAME PROCESS RANK``, and waits for a file NAME."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.jobs import PATIENCE, Job, supervised, wait_until


class GatedRun:
    """A run of such a script with two ranks, through any number of starts."""

    def __init__(
        self,
        script: Path,
        folder: Path,
        *options: str,
        place: Callable[[list[str]], list[str]] = lambda command: command,
    ) -> None:
        self._script, self.folder, self._options, self._place = script, folder, options, place
        self.jobs: list[Job] = []
        folder.mkdir(exist_ok=True)

    def begin(self, *gates: int, **environ: str) -> Job:
        self.open(*gates)
        words = [*supervised(*self._options), sys.executable, str(self._script), str(self.folder)]
        self.jobs.append(Job(self._place(words), self.folder / f"log-{len(self.jobs)}", environ))
        return self.jobs[-1]

    def open(self, *gates: int) -> None:
        """Let ranks pass these gates."""
        for gate in gates:
            (self.folder / str(gate)).touch()

    def at(self, gate: int, other_than: dict[int, int] | None = None) -> dict[int, int]:
        """Wait until both ranks are at a gate, in other processes than these; return theirs, by rank."""
        job, others = self.jobs[-1], set((other_than or {}).values())

        def look() -> dict[int, int]:
            lines = re.findall(rf"gate {gate} (\d+) (\d)", job.log.read_text())
            found = {int(rank): int(process) for process, rank in lines}
            return found if len(found) == 2 and not others & set(found.values()) else {}

        return wait_until(job, look, f"rank at gate {gate}")

    def printed(self, name: str) -> str:
        """Wait until the job has ended well; return the rest of its line that begins with a name."""
        job = self.jobs[-1]
        assert job.wait(PATIENCE) == 0, job.tail()
        lines: list[str] = re.findall(rf"{name} (.*)", job.log.read_text())
        return lines[-1]

    def kill(self) -> None:
        for job in self.jobs:
            job.kill()
