"""One training process with the page, the stacks and the notes that its guardian reads."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Page, Phase, Reading
from hvdrecover.launch import processes

logger = logging.getLogger(__name__)

_PIPE = 1 << 18  # bytes of events that wait until the guardian looks, a few times a second
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"


class Training:
    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rejoins: bool = False,
        stdin: int | None = None,
        hand_down: Sequence[int] = (),
    ) -> None:
        # Memory without a name: no file is left behind after a kill.
        self._descriptors = [os.memfd_create(f"hvdrecover-{name}") for name in ("page", "stacks", "notes")]
        page, self.stacks, self._notes = self._descriptors
        self._events, events = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._unread = b""  # the beginning of an event whose rest has not arrived
        # Linux limits each user's memory in pipes. Beyond the limit, the size stays 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE)
        os.ftruncate(page, heartbeat.SIZE)
        self.page = Page.from_buffer(mmap.mmap(page, heartbeat.SIZE))
        self.page.begin(Phase.UNKNOWN)
        self._seen = 0
        self._left = False
        settings = {
            "HVDRECOVER_SLOT": ",".join(map(str, [*self._descriptors, events])),
            "HOROVOD_STALL_REPORT": str(self._notes),
            **_huge_pages(environ),
        }
        if rejoins:
            settings["HVDRECOVER_REJOIN"] = "1"
        kept = [*self._descriptors, events, *hand_down]
        try:
            self.process = processes.start(command, {**environ, **settings}, hand_down=kept, stdin=stdin)
        finally:
            os.close(events)
        self._descriptors.append(self._events)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Return its exit code, or None while it runs. A process that cannot be killed counts as killed."""
        code = self.process.poll()
        return -signal.SIGKILL if code is None and self._left else code

    def read(self) -> Reading:
        return self.page.read()

    def notes(self) -> dict[str, Any]:
        return heartbeat.notes_since(self._notes, 0)

    def events(self) -> list[dict[str, Any]]:
        data = self._unread
        with contextlib.suppress(BlockingIOError):
            while new := os.read(self._events, _PIPE):
                data += new
        *lines, self._unread = data.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # children of the process may write there, too
                found.append(json.loads(line))
        return [each for each in found if isinstance(each, dict)]

    def stalled(self) -> dict[int, list[str]]:
        """Return which tensors wait for which ranks, if Horovod has reported that since the last call.

        Horovod reports them on rank 0 only, and whenever it ends a stall.
        """
        seen, self._seen = self._seen, os.fstat(self._notes).st_size
        stalled = heartbeat.notes_since(self._notes, seen).get("stalled", {})
        return {int(rank): names for rank, names in stalled.items()}

    def kill(self) -> bool:
        """SIGKILL it and its process group, wait, and return whether it ended; if not, log it."""
        self.process.kill_group()
        if self._left or self.process.ends():
            return not self._left
        self._left = True
        logger.error("%s can't be killed, as a disk hangs perhaps: left", processes.named([self.pid]))
        return False

    def close(self) -> None:
        """Kill its process group, and free its memory."""
        self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which glibc (from 2.35 on) asks for huge pages, unless the user has set it.

    Without them, a killed process with a state of 1 GB frees 250,000 pages before its death is reported.
    """
    given = environ.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return {}
    return {_TUNABLES: ":".join([*([given] if given else []), f"{_HUGE_PAGES}=1"])}
