"""Faults of host discovery: the program that is asked for hosts fails, or does not answer."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, OfOneRank
from hvdrecover.launch import processes

# What it is to do is in a file beside it. It ends with whoever has started it, even if that is gone already.
_PROGRAM = """#!/bin/sh
still_hangs() { [ -e "$0.mood" ] && [ "$PPID" != 1 ] && kill -0 "$PPID" 2>/dev/null; }
case "$(cat "$0.mood" 2>/dev/null)" in
    fail) echo "the inventory can't be reached (a drill's doing)" >&2; exit 1;;
    hang) while still_hangs; do sleep 0.1; done; exit 1;;
esac
SLOTS
"""


class _Discovery(OfOneRank):
    """The run asks a program of the drill for its hosts, as ``--discover "command PROGRAM"``."""

    lasting: ClassVar[bool] = True
    mood: ClassVar[str]

    def lacks(self, run: Drilled) -> str:
        """Return whether the drill may say where the run is."""
        if run.names_hosts:
            return "the drill's own host discovery, as the run is told its hosts; leave out -H and the like"
        return ""

    def prepare(self, run: Drilled) -> dict[str, str]:
        """Write the program."""
        path = run.folder / "discovery"
        path.write_text(_PROGRAM.replace("SLOTS", "\n".join(f"echo {line}" for line in run.slots)))
        path.chmod(0o755)
        return {}

    def options(self, run: Drilled) -> list[str]:
        """Have hosts discovered by it, and what is remembered of them kept with the run."""
        program, cache = os.fspath(run.folder / "discovery"), os.fspath(run.folder / "hosts")
        return ["--discover", shlex.join(["command", "--cache", cache, program])]

    def strike(self, run: Drilled, rank: int) -> None:
        """Let it fail or hang, and kill the rank's process, so that the job recovers meanwhile."""
        path = run.folder / "discovery.mood"
        path.with_suffix(".new").write_text(self.mood)
        path.with_suffix(".new").replace(path)
        processes.kill(run.process_of(rank))

    def end(self, run: Drilled) -> None:
        """Let it answer again."""
        (run.folder / "discovery.mood").unlink(missing_ok=True)


@dataclass(frozen=True)
class DiscoveryFails(_Discovery):
    """The program that names hosts fails, and a training process is killed.

    The last good answer stands in, with a warning, and the job recovers as from a kill alone.
    """

    name: ClassVar[str] = "discovery-fails"
    summary: ClassVar[str] = "host discovery fails, and a training process is killed"
    mood: ClassVar[str] = "fail"


@dataclass(frozen=True)
class DiscoveryHangs(_Discovery):
    """The program that names hosts does not answer, and a training process is killed.

    It is not waited for longer than half a second at a time, and the last good answer stands in: the job
    recovers as from a kill alone.
    """

    name: ClassVar[str] = "discovery-hangs"
    summary: ClassVar[str] = "host discovery does not answer, and a training process is killed"
    mood: ClassVar[str] = "hang"
