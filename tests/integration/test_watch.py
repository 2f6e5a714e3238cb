"""A real run is followed in a terminal, through a SIGKILL to its end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.support.commands import wait_until
from tests.support.faulty_run import EPOCHS, FaultyRun, wait_until_all_train
from tests.support.jobs import PATIENCE, kill

pytestmark = pytest.mark.acceptance

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Watch:
    """``hvdrecover report --watch`` in a terminal of its own, and all that it has shown so far."""

    def __init__(self, *arguments: object) -> None:
        self._parent, child = pty.openpty()
        self._shown = b""
        command = [sys.executable, "-m", "hvdrecover", "report", *map(str, arguments), "--watch"]
        environ = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ)
        os.close(child)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._parent, 1 << 16):
                self._shown += piece
        except OSError:  # how Linux says that the other side is closed
            pass

    @property
    def shown(self) -> str:
        return _CODES.sub("", self._shown.decode(errors="replace"))

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.shown), PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            kill(self.process.pid)
        self.process.wait()
        self._reader.join()
        os.close(self._parent)


def test_a_run_is_followed_through_a_fault_to_its_end(start: Start, tmp_path: Path) -> None:
    run = FaultyRun(tmp_path, "torch", epochs=EPOCHS)
    (tmp_path / "events").mkdir()
    with closing(Watch(tmp_path / "events")) as watch:
        watch.wait_for("waiting for")
        # Here, and only here, a standby that has imported torch's compiler and exporter is woken.
        job = run.begin(start, standby=True)
        watch.wait_for(r"state +starting")
        watch.wait_for(r"state +training")
        run.wait_for(job, lambda batch: batch.commit >= 6)
        generation = max(run.generations())
        kill(run.process_of(1))
        wait_until_all_train(run, job, after=generation)
        watch.wait_for(r"progress +commit \d+ in generation 2 with 2 ranks")
        watch.wait_for(r"faults +1 \(1 crash\); 1 recovered from")
        watch.wait_for(r"durable +commit \d+, \d.* old")
        assert watch.process.wait(PATIENCE) == 0
        assert job.wait(PATIENCE) == 0, job.tail()
        assert re.search(r"last fault +\S+ \S+ crash of rank 1 on .*SIGKILL", watch.shown)
        last = run.events("finished")[0]["commit"]
        end = watch.shown[watch.shown.rindex("state ") :]
        assert re.match(r"state +finished\s", end)
        assert f"commit {last} in generation 2 with 2 ranks" in end
