"""The Slurm job that a supervisor runs in: how long it has its hosts, and its requeue."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping

from hvdrecover import config
from hvdrecover.discovery.slurm import expanded
from hvdrecover.discovery.sources import output_of
from hvdrecover.errors import DiscoveryError
from hvdrecover.launch import waits
from hvdrecover.machine import SYSTEM_CLOCK, Clock

logger = logging.getLogger("hvdrecover")

_AT_THE_END = 300.0  # seconds before a job's end, in which it was not preempted, but has had its time
_HEIR = 3600.0  # seconds for Slurm to find that a node is lost; SlurmdTimeout is 300 by default
_FIELDS = ("JobState", "Requeue", "BatchFlag", "EndTime", "PreemptTime", "NodeList", "BatchHost")
_FIELD = re.compile(rf"(?:^| )({'|'.join(_FIELDS)})=(\S*)")


def planned(shown: str, job: str) -> dict[str, str]:
    """Return a job's plan from ``scontrol show job --oneliner``; empty if Slurm does not know the job."""
    # There is a line for each task of an array, and for each part of a heterogeneous job.
    line = next((line for line in shown.splitlines() if line.startswith(f"JobId={job} ")), None)
    return dict.fromkeys(_FIELDS, "") | dict(_FIELD.findall(line)) if line else {}


def _may_requeue(plan: Mapping[str, str]) -> bool:
    """Return whether a plan belongs to a batch job that runs and may start again."""
    # A job that is COMPLETING was cancelled and must stay so, or is requeued by Slurm itself.
    return (plan.get("JobState"), plan.get("Requeue"), plan.get("BatchFlag")) == ("RUNNING", "1", "1")


class SlurmJob:
    """The Slurm job of this process; a thread asks the controller, which may be slow."""

    def __init__(self, environ: Mapping[str, str], job: str, clock: Clock) -> None:
        self._environ = {**environ, "SLURM_TIME_FORMAT": "%s"}  # in seconds since 1970
        self._job = job
        self._clock = clock
        self._plan: dict[str, str] = {}
        self._never = threading.Event()
        self._thread = threading.Thread(target=self._keep_asking, name="slurm", daemon=True)

    @property
    def name(self) -> str:
        """The name for ``scontrol requeue``: in an array, the last task has the id of the whole array."""
        array, task = self._environ.get("SLURM_ARRAY_JOB_ID"), self._environ.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else self._job

    def watch(self) -> None:
        self._thread.start()

    def ends_within(self, seconds: float) -> str:
        """Return how the job ends within so many seconds; '' if it does not, or is ending already."""
        # Slurm signals a batch script before its end only with `--signal=B:…`, and before a preemption only
        # if the cluster is configured to. `scontrol` shows it at once: `EndTime` moves to the grace's end.
        left = self._left(self._plan)
        if left > seconds or self._plan.get("JobState") != "RUNNING":
            return ""
        why = "preempts it" if self._plan["PreemptTime"].isdecimal() else "ends it at its time limit"
        return f"Slurm {why} in {max(left, 0.0):.0f} s"

    def _left(self, plan: Mapping[str, str]) -> float:
        """Return the seconds until Slurm ends the job; infinite without a time limit."""
        end = plan.get("EndTime", "")
        return float(end) - self._clock.now() if end.isdecimal() else math.inf

    def requeue(self, *, committed: bool) -> None:
        """Requeue the job if Slurm lets it; call this last, as Slurm kills the job's processes."""
        # Only if the batch script became this process by `exec`; another one sees the exit code, and decides.
        if self._environ.get("SLURM_TASK_PID") != str(os.getpid()):
            return
        try:
            if not _may_requeue(plan := self._asked()):
                return
            in_time = committed or plan["PreemptTime"].isdecimal() or self._left(plan) >= _AT_THE_END
            if not in_time:
                why = "it has made no commit within its time limit, nor would it the next time"
                advice = "raise --time, or commit more often"
                logger.error("Slurm job %s is not requeued: %s; %s", self.name, why, advice)
                return
            logger.warning("Slurm job %s is requeued", self.name)
            self._scontrol("requeue", self.name)
        except DiscoveryError as error:
            logger.error("Slurm job %s could not be requeued: %s", self.name, error)

    def outlive_script(self) -> None:
        """Wait until Slurm ends the job, or the job has lost its script and can be requeued."""
        for _ in range(int(_HEIR / waits.BETWEEN_QUESTIONS)):
            try:
                if not _may_requeue(plan := self._asked()):
                    return
                if plan["BatchHost"] and plan["BatchHost"] not in expanded(plan["NodeList"]):
                    self._scontrol("requeue", self.name)  # the script was lost with its node
                    return
            except DiscoveryError:  # the controller or this host is cut off
                pass
            self._clock.wait(self._never, waits.BETWEEN_QUESTIONS)

    def _keep_asking(self) -> None:
        stops = False
        while not stops:
            try:
                self._plan = self._asked() or self._plan
            except DiscoveryError as error:
                logger.debug("the end of Slurm job %s is not known: %s", self.name, error)
            stops = self._clock.wait(self._never, waits.BETWEEN_QUESTIONS)

    def _asked(self) -> dict[str, str]:
        shown = self._scontrol("show", "job", "--oneliner", self._job)
        return planned(shown.decode(errors="replace"), self._job)

    def _scontrol(self, *words: str) -> bytes:
        return output_of(("scontrol", *words), self._environ, waits.CONTROLLER)


def of_environment(environ: Mapping[str, str], clock: Clock) -> SlurmJob | None:
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    return SlurmJob(environ, job, clock) if job else None


def leave_heir(environ: Mapping[str, str], host: str) -> None:
    """Start a process that requeues this Slurm job if its first node, with the supervisor, is lost."""
    if of_environment(environ, SYSTEM_CLOCK) is None or host == environ.get("SLURMD_NODENAME"):
        return
    # With `--no-kill`, a job that loses its script with a node stays, empty, until its time limit.
    words, nothing = [sys.executable, "-m", __name__], subprocess.DEVNULL
    subprocess.Popen(  # no deadline: the last act of a guardian
        words, env=dict(environ), stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )


if __name__ == "__main__":
    if (heir_of := of_environment(config.environment(), SYSTEM_CLOCK)) is not None:
        heir_of.outlive_script()
