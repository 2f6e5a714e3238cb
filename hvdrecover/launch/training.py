"""One training process with the page, the stacks and the notes that its guardian reads."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Page, Phase, Reading
from hvdrecover.launch import processes


class Training:
    """A process that trains, or stands by to.

    Args:
        command: program and arguments.
        environ: its environment.
        rejoins: whether it takes the place of one that was lost.
        stdin: as for `subprocess.Popen`.

    Raises:
        OSError: the program can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rejoins: bool = False,
        stdin: int | None = None,
    ) -> None:
        # Memory without a name: nothing to remove, whoever is killed.
        self._descriptors = [os.memfd_create(f"hvdrecover-{name}") for name in ("page", "stacks", "notes")]
        page, self.stacks, self._notes = self._descriptors
        os.ftruncate(page, heartbeat.SIZE)
        self.page = Page(mmap.mmap(page, heartbeat.SIZE))
        self.page.begin(Phase.UNKNOWN)
        self._heard = 0
        settings = {
            "HVDRECOVER_SLOT": ",".join(map(str, self._descriptors)),
            "HOROVOD_STALL_REPORT": str(self._notes),
        }
        if rejoins:
            settings["HVDRECOVER_REJOIN"] = "1"
        self.process: subprocess.Popen[bytes] = processes.start(
            command, {**environ, **settings}, hand_down=self._descriptors, stdin=stdin
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """How it has ended, as `subprocess` tells it; None while it runs."""
        return self.process.poll()

    def read(self) -> Reading:
        """What its page says."""
        return self.page.read()

    def notes(self) -> dict[str, Any]:
        """What it has told in words: of each fact the last that was said."""
        return self._told(0)

    def stalled(self) -> dict[int, list[str]]:
        """Which tensors wait for which ranks, if Horovod has told so since the last time."""
        heard, self._heard = self._heard, os.fstat(self._notes).st_size
        stalled = self._told(heard).get("stalled", {}) if self._heard > heard else {}
        return {int(rank): names for rank, names in stalled.items()}

    def _told(self, start: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        size = os.fstat(self._notes).st_size
        for line in os.pread(self._notes, size - start, start).splitlines():
            try:
                told.update(json.loads(line))
            except ValueError:  # it was killed as it wrote
                continue
        return told

    def kill(self) -> None:
        """SIGKILL it and all that is left of its process group, and wait for its end."""
        processes.kill_group(self.pid)
        self.process.wait()

    def close(self) -> None:
        """Kill what is left of it, and free its memory."""
        self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
