"""The near tier beside the peers that keep checkpoints in memory: one small job under each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs.launchers import WORKERS, Launcher
from benchmarks.jobs.near_peers_training import SHAPE, STEP_SECONDS
from benchmarks.jobs.near_roots import tidied
from benchmarks.jobs.running import Running
from benchmarks.rows import Fact, Goal, Row
from benchmarks.states import Setting
from hvdrecover import config
from hvdrecover.errors import HvdrecoverError
from hvdrecover.examples.digits_run import supervised

# Without what they require: torch is here, and the rest is not needed on CPUs.
_PACKAGES = ("dlrover==0.6.1", "lm-resiliency==0.2.0")
_NEEDED = (
    *("psutil", "pynvml", "nvidia-ml-py", "deprecated", "wrapt", "packaging", "requests", "kubernetes"),
    *("tornado", "grpcio"),
)
_INSTALL_SECONDS = 600.0
_FAULTS, _RESTARTS = 2, 20
_BETTER = Goal(1.0, 1.0)
_OURS = "hvdrecover run"


@dataclass
class _Found:
    """The cost of faults, and of being prepared: seconds, steps and milliseconds."""

    one: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)


def measure(setting: Setting) -> list[Row | Fact]:
    """The same faults under each, in jobs by turns."""
    try:
        python = _environment()
    except (OSError, subprocess.SubprocessError) as error:
        return [Fact("dlrover and lm-resiliency are not measured", f"they can't be installed: {error}")]
    found: dict[str, _Found] = {}
    facts: list[Row | Fact] = []
    for launcher in _launchers(python):
        try:
            found[launcher.title] = _strike(launcher, setting.folder / f"peer-{launcher.way}")
        except HvdrecoverError as error:
            if launcher.title == _OURS:
                raise
            facts.append(Fact(f"{launcher.title} is not measured", str(error).splitlines()[0]))
    ours = found.pop(_OURS)
    return [row for title, theirs in found.items() for row in _rows(ours, title, theirs)] + facts


def _rows(ours: _Found, title: str, theirs: _Found) -> list[Row | Fact]:
    state = f"{SHAPE.title}, a step of {1e3 * STEP_SECONDS:.0f} ms"
    lost = "steps lost when all processes are killed"
    rows: list[Row | Fact] = [
        Row(
            "near",
            "SIGKILL of one worker to the next step of all",
            state,
            "s",
            ours.one,
            title,
            theirs.one,
            _BETTER,
        ),
        Row(
            "near", "SIGKILL of all to the next step of all", state, "s", ours.all, title, theirs.all, _BETTER
        ),
        Row("near", lost, state, "steps", ours.lost),
        Row("near", f"{lost}: {title}", state, "steps", theirs.lost),
    ]
    if theirs.stalls:
        what = "stall of a commit, of a save to memory; ranks aligned"
        rows.append(Row("near", what, state, "ms", ours.stalls, title, theirs.stalls, _BETTER))
        # dlrover's save waits for nobody; a commit ends when all ranks know who leaves, and what has failed.
        rows.append(Row("near", "the same, the copy alone", state, "ms", ours.copies, title, theirs.stalls))
    return rows


def _strike(launcher: Launcher, folder: Path) -> _Found:
    found = _Found()
    with tidied(folder / "checkpoint"), Running(launcher, "near_peers", folder) as job:
        for number in range(_FAULTS):
            job.settle()
            found.one.append(job.strike(number % WORKERS))
            job.settle()
            seconds, lost = job.strike_all()
            found.all.append(seconds)
            found.lost.append(float(lost))
        processes = {step.pid for step in job.steps() if step.rank == 0}
        found.stalls += _stalls(folder, processes)
        found.copies += _copies(folder, processes)
    return found


def _stalls(folder: Path, processes: set[int]) -> list[float]:
    """Milliseconds of saves on rank 0; of lm-resiliency none, whose hook is part of the optimizer's step."""
    if folder.name.endswith("lm-resiliency"):
        return []
    files = [folder / "steps" / f"{process}.stalls" for process in processes]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return [float(line) for line in lines if line.endswith("\n")]


def _copies(folder: Path, processes: set[int]) -> list[float]:
    """Milliseconds of the copies of our commits on rank 0; of others none."""
    files = [file for process in processes for file in folder.glob(f"events/*-{process}.jsonl")]
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [1e3 * event["stall"] for event in events if event["kind"] == "commit"]


def _launchers(python: Path) -> Sequence[Launcher]:
    gloo = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    counts = ["--nproc-per-node", str(WORKERS), "--max-restarts", str(_RESTARTS)]
    dlrover = [os.fspath(python), "-m", "benchmarks.jobs.near_dlrover", "--standalone", *counts, "-m"]
    torchrun = [os.fspath(python), "-m", "torch.distributed.run", "--standalone", *counts, "-m"]
    return (
        Launcher(_OURS, "hvdrecover", lambda _: supervised(workers=WORKERS), standbys=WORKERS),
        Launcher(_PACKAGES[0].replace("==", " "), "dlrover", lambda _: dlrover, python=False, settings=gloo),
        Launcher(
            _PACKAGES[1].replace("==", " "), "lm-resiliency", lambda _: torchrun, python=False, settings=gloo
        ),
    )


def _environment() -> Path:
    """Return the Python of an environment with the peers, beside all that this one has; made on demand."""
    folder = config.cache(os.environ) / "benchmarks" / "near-peers"
    python, ready = folder / "bin" / "python", folder / "ready"
    here = sysconfig.get_path("purelib")
    asked = "\n".join([*_PACKAGES, here])
    if not ready.exists() or ready.read_text() != asked:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (site / "beside.pth").write_text(f"{here}\n")
        pip = [sys.executable, "-m", "pip", "--python", os.fspath(python), "install", "--quiet", "--no-deps"]
        wanted = [*_PACKAGES, *_NEEDED]
        subprocess.run([*pip, *wanted], check=True, timeout=_INSTALL_SECONDS)
        ready.write_text(asked)
    return python
