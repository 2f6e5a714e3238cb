"""The harness of acceptance tests for several hosts on one machine; see `tests.support.jobs`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hvdrecover.drill.lab import INTERFACE, Host, Lab, find, lacks, program, traces
from tests.support.faulty_run import SECRET, FaultyRun, assert_each_sample_once, wait_until_all_train
from tests.support.jobs import GUARDIAN, Batch, Job, running

__all__ = ["INTERFACE", "SLOW_HOSTS", "Host", "JobInLab", "Lab", "find", "lacks", "program", "traces"]

EPOCHS = 200  # more than any test waits for
# Of a job on hosts that are slow, as they share two processors with other tests: none is lost for that. As
# by default, ssh notices a lost host before ranks give it up.
SLOW_HOSTS = {
    "HVDRECOVER_SSH_OPTIONS": "-o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o ConnectTimeout=30",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
}


class JobInLab:
    """A digits job under ``hvdrecover run`` on the lab's hosts, one slot each."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        framework: str,
        start: Callable[..., Job],
        discover: str = "",
        environ: Mapping[str, str] | None = None,
        alone: bool = False,  # whether it begins on the launcher's host, until `list` names more
    ) -> None:
        self.lab = lab
        self.run = FaultyRun(folder / "run", framework, (), EPOCHS, "--step-seconds", "0.04")
        self._listing = folder / "hosts"
        self._near = folder / "near"
        self._start = start
        self._discover = discover or f"file {self._listing}"
        self._environ = {"AWS_SECRET_ACCESS_KEY": SECRET, "FAULTS_NEAR": str(self._near), **(environ or {})}
        self._options = ["-np", "1"] if alone else ["-np", "3", "--network-interface", INTERFACE]
        self.list(*lab.hosts[: 1 if alone else None])
        self.job = self.begin()

    def list(self, *hosts: Host) -> None:
        """Have host discovery name these hosts from now on."""
        fresh = self._listing.with_suffix(".new")
        fresh.write_text("".join(f"{host.address}:1\n" for host in hosts))
        fresh.rename(self._listing)

    def begin(self) -> Job:
        command = [sys.executable, "-m", "hvdrecover", "run", "--min-np", "1", "--no-standby"]
        command += [*self._options, "--discover", self._discover]
        command += ["-i", os.fspath(self.lab.key), "--blacklist-cooldown-range", "1", "60", "--"]
        environ = {**SLOW_HOSTS, "OMP_NUM_THREADS": "1", **self._environ}
        self.job = self._start(self.run, self.lab.hosts[0].command(command), environ)
        return self.job

    def wait_for(self, size: int, after: int = 0) -> Batch:
        return wait_until_all_train(self.run, self.job, after, size)

    def guardian_on(self, host: Host) -> int:
        (guardian,) = set(running(self.job, *GUARDIAN)) & set(host.processes())
        return guardian

    def generation(self) -> int:
        return self.run.batches()[-1].generation

    def explained(self) -> dict[str, str]:
        """Return what becomes of each host, as host discovery explains it."""
        command = [sys.executable, "-m", "hvdrecover", "discover", "file", os.fspath(self._listing)]
        command += ["--allow-empty", "--identity", os.fspath(self.lab.key), "--explain"]
        printed = subprocess.check_output(self.lab.hosts[0].command(command), text=True)
        return {line.split()[0]: line.split()[2] for line in printed.splitlines()[1:]}

    def assert_each_sample_once(self) -> None:
        self.run.wait_for(self.job, lambda batch: batch.epoch > 0)
        last = max(batch.epoch for batch in self.run.committed())
        assert last > 0
        assert_each_sample_once(self.run, padding=2, epochs=last)
