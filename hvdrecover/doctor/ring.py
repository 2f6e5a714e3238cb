"""A ring allreduce on all ranks, started as a job is, beside mpi4py's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.doctor.findings import Finding, failure, ok, skipped
from hvdrecover.doctor.ranks import MARK, SIZES
from hvdrecover.errors import HvdrecoverError
from hvdrecover.install.process import relevant_tail
from hvdrecover.launch import horovodrun, ssh
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.job import Job

MPI = "mpi4py"
_PARTING = 5.0  # seconds for a launcher to end its ranks
_MARGIN = 5.0  # seconds for ranks that nobody ends
_NO_QUESTIONS = (
    "-o BatchMode=yes -o StrictHostKeyChecking=no"  # horovodrun sets the second only for its own calls
)
_MPI_FILES = "TMPDIR"  # where mpirun keeps its own; the settings of its own would reach other hosts too
_SHOWN = 20  # lines
_PREFIX = re.compile(r"\[[\d,]+\]<std(out|err)>:")  # of what ranks print
_CAUSE = re.compile(r"[A-Z]\w*(Error|Exception): ")  # Python's; what comes later follows from it


@dataclass(frozen=True)
class Launched:
    """The result of starting ranks.

    Attributes:
        by: what summed: ``torch``, ``tensorflow`` or ``mpi4py``.
        ranks: how many should have.
        built: what Horovod says is built in, of the first rank that could import it; empty if none could.
        sums: rank to what it has found, as `hvdrecover.doctor.ranks` tells it.
        ending: how the launcher has ended, in words; empty if well.
        log: the last lines that explain a failure.
    """

    by: str
    ranks: int
    built: Mapping[str, bool]
    sums: Mapping[int, Mapping[str, Any]]
    ending: str
    log: Sequence[str]

    @property
    def check(self) -> str:
        """The check's name."""
        return check_of(self.by)


def check_of(by: str) -> str:
    """The check's name."""
    return f"allreduce: {by}"


def launch(by: str, options: Options, folder: Path, seconds: float) -> Launched:
    """Start ranks by ``horovodrun``, over Gloo, or for mpi4py by ``mpirun``; return when all are gone.

    Args:
        by: what sums.
        options: which ranks where.
        folder: for files; of this run only.
        seconds: how long it may take.

    Raises:
        LaunchError: it can't be started.
    """
    read = config.read()
    path = ssh.kept_alive(replace(read, ssh_options=f"{read.ssh_options} {_NO_QUESTIONS}"), folder)
    others = ("--disable-cache", *(_mpi_home(path, read.programs) if by == MPI else ()))
    chosen = replace(options, mpi=by == MPI, static=by != MPI, others=others)
    rank = [sys.executable, "-m", "hvdrecover.doctor.ranks", by, f"{seconds + _MARGIN:g}"]
    environ = horovodrun.settings(None, config.environment(), ours=horovodrun.is_ours())
    how = "mpi" if by == MPI else "gloo"
    command = [
        sys.executable,
        "-m",
        "hvdrecover.launch.run_horovodrun",
        how,
        *horovodrun.arguments(chosen, rank),
    ]
    files = {_MPI_FILES: os.fspath(folder)}  # which an mpirun that is killed leaves behind
    job = Job(command, folder / f"{by}.log", {**environ, **files, "PATH": path})
    try:
        code = job.wait(seconds)
        ending = f"it ended with exit code {code}" if code else ""
    except HvdrecoverError:
        ending = f"it had not ended after {seconds:g} s"
    finally:
        _end(job)
    return understood(by, options.processes, job.log.read_text(errors="replace"), ending)


def _end(job: Job) -> None:
    """End what is left of a job; ``mpirun``, below a shell, ends its daemons if it is asked to end."""
    try:
        if job.running:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            deadline = time.monotonic() + _PARTING
            while job.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        job.kill()


def _mpi_home(path: str, programs: str) -> tuple[str, ...]:
    """Return where other hosts find the rest of an MPI in this Python's environment: at the same place."""
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None or Path(mpirun).parent != Path(programs):
        return ()
    return (f"--mpi-args=--prefix {shlex.quote(os.fspath(Path(programs).parent))}",)


def understood(by: str, ranks: int, log: str, ending: str) -> Launched:
    """Return what ranks have told, in the output of their launcher."""
    built: Mapping[str, bool] = {}
    sums: dict[int, Mapping[str, Any]] = {}
    others = []
    for line in log.splitlines():
        _, marked, text = line.partition(MARK)
        if not marked:
            others += [line] if _PREFIX.sub("", line, count=1).strip() else []
            continue
        try:
            told = json.loads(text)
        except ValueError:  # it was killed as it spoke
            others.append(line)
            continue
        if told["kind"] == "summed":
            sums[told["rank"]] = told
        else:
            built = built or told.get("built", {})
    return Launched(by, ranks, built, sums, ending, _explaining(others))


def _explaining(lines: Sequence[str]) -> list[str]:
    """The lines that end with the cause, whatever other ranks have said after it; without one the last."""
    cause = next((number for number, line in enumerate(lines) if _CAUSE.search(line)), None)
    return relevant_tail(lines, _SHOWN) if cause is None else list(lines[: cause + 1][-_SHOWN:])


def bus_bandwidth(ranks: int, nbytes: int, seconds: float) -> float:
    """Bytes per second over the slowest link, if an allreduce is done in the best way there is.

    It is ``2 (n - 1) / n * bytes / time``, so that values of different numbers of ranks can be compared:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    """
    return 2 * (ranks - 1) / ranks * nbytes / seconds


def judge(launched: Launched, mpi: Launched | None) -> Finding:
    """Return whether Horovod's sums are right, and how fast they were.

    Args:
        launched: what came of it.
        mpi: what came of mpi4py's, if its sums are right.
    """
    if wrong := _wrong(launched, mpi):
        remedy = (
            "Don't train like this. Look for faulty memory or network cards on the hosts of these ranks, and "
            "run `hvdrecover install-horovod --rebuild`."
        )
        return failure(launched.check, "; ".join(wrong), remedy, **_facts(launched))
    if len(launched.sums) < launched.ranks or launched.ending:
        return failure(launched.check, _missing(launched), _remedy(launched.log), **_facts(launched))
    beside = f" (mpi4py: {_bandwidth(mpi) / 1e9:.2f} GB/s)" if mpi is not None else ""
    return ok(launched.check, f"{_described(launched)}{beside}", **_facts(launched))


def judge_mpi(launched: Launched) -> Finding:
    """Return the finding about mpi4py's sums. Jobs can do without MPI, so it is never a failure."""
    if wrong := _wrong(launched, None):
        remedy = "Look for faulty memory or network cards on the hosts of these ranks, or reinstall MPI."
        return failure(launched.check, "; ".join(wrong), remedy, **_facts(launched))
    if len(launched.sums) < launched.ranks or launched.ending:
        return skipped(launched.check, f"mpirun can't be used here: {_missing(launched)}", **_facts(launched))
    return ok(launched.check, _described(launched), **_facts(launched))


def _wrong(launched: Launched, mpi: Launched | None) -> list[str]:
    """A line for each rank with a wrong sum."""
    lines = []
    peers = [] if mpi is None else list(mpi.sums.values())
    for rank, told in sorted(launched.sums.items()):
        for number, each in enumerate(told["sums"]):
            where = f"rank {rank} on {told['host']}"
            if each["wrong"]:
                index, value, right = each["first_wrong"]
                elements = f"{each['wrong']} of {each['bytes'] // 4} elements of the sum are wrong"
                lines.append(f"{where}: {elements}, the first at {index}: {value:g} instead of {right:g}")
            elif any(peer["sums"][number]["digest"] != each["digest"] for peer in peers):
                lines.append(f"{where}: its sum differs from mpi4py's in some bit")
    return lines


def _missing(launched: Launched) -> str:
    answered = f"{len(launched.sums)} of {launched.ranks} ranks have summed"
    last = next((line for line in reversed(launched.log) if any(map(str.isalpha, line))), "")
    words = _PREFIX.sub("", next(filter(_CAUSE.search, launched.log), last), count=1)
    return ": ".join(filter(None, [", ".join(filter(None, [answered, launched.ending])), words.strip()]))


def _remedy(log: Sequence[str]) -> str:
    text = "\n".join(log)
    if "via ssh" in text:
        return "See what is said of ssh here, and mend that first."
    if "common task-to-task" in text or "check connectivity" in text:
        return "Name the interface that connects the hosts with --network-interface."
    return "Mend what its last lines complain of; --json has more of them."


def _bandwidth(launched: Launched) -> float:
    return bus_bandwidth(launched.ranks, SIZES[-1], _seconds(launched, -1))


def _seconds(launched: Launched, number: int) -> float:
    """Return how long the slowest rank took for the sum of a size."""
    return max(float(told["sums"][number]["seconds"]) for told in launched.sums.values())


def _described(launched: Launched) -> str:
    elements = f"{SIZES[-1] // 4:,} elements are right on all of {launched.ranks} ranks"
    speed = f"{SIZES[0] // 1024} KiB in {_seconds(launched, 0) * 1e3:.3g} ms"
    if launched.ranks > 1:
        speed += f", bus bandwidth {_bandwidth(launched) / 1e9:.2f} GB/s"
    return f"{elements}; {speed}"


def _facts(launched: Launched) -> dict[str, Any]:
    complete = len(launched.sums) == launched.ranks
    return {
        "ranks": launched.ranks,
        "hosts": {rank: told["host"] for rank, told in sorted(launched.sums.items())},
        "sums": [
            {
                "bytes": size,
                "seconds": _seconds(launched, number),
                "bus_bytes_per_second": bus_bandwidth(launched.ranks, size, _seconds(launched, number)),
            }
            for number, size in enumerate(SIZES)
        ]
        if complete
        else [],
        "log": [] if complete and not launched.ending else list(launched.log),
    }
