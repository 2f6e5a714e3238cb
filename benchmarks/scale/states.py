"""Figures of states of some sizes, each in processes of its own, so that none leaves memory behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Curve, Fact, Found
from benchmarks.scale import PAGE
from benchmarks.scale.one_state import NEAR, Figures
from benchmarks.states import Shape
from benchmarks.workers import WORKERS
from hvdrecover import machine
from hvdrecover.drill.run import Job
from hvdrecover.errors import HvdrecoverError
from tests.support.jobs import static

_PATIENCE = 300.0
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class _Way:
    """A way to look at a state."""

    states: float  # memory that it takes, in states, the training's own included
    workers: int = 1  # processes


# Where commits don't find room for a second copy, each waits for the write before it, as users' do.
_WAYS = {"commits": _Way(2.4), "restores": _Way(2.2), "syncs": _Way(4.8, WORKERS), "near": _Way(5.2)}
_FIGURES = {
    "commit": ("a commit", "s", "seconds"),
    "near": ("a commit into the near tier", "s", "seconds"),
    "sealed": ("until it is sealed there", "s", "seconds"),
    "durable": ("until a commit is durable", "s", "seconds"),
    "restore": ("restore, nothing cached", "s", "seconds"),
    "sync": ("sync of a new worker over loopback", "s", "seconds"),
    "idle": ("memory of commits when idle (promise: 1)", "states", "memory"),
    "beside": ("memory of commits beside a write (promise: 2)", "states", "memory"),
    "loading": ("memory of a restore at its peak", "states", "memory"),
    "keeper": ("memory of the near tier's keeper, tier included (promise: 3)", "states", "memory"),
    "tmpfs": ("the near tier itself (promise: 3)", "states", "memory"),
}


def curves(chart: str, along: str, shapes: Mapping[float, Shape], rounds: int, folder: Path) -> list[Found]:
    """Measure all figures of some states.

    Args:
        chart: the picture that they are drawn in; those of memory in another one beside it.
        along: what the numbers of the states count.
        shapes: number to state.
        rounds: how often to measure each.
        folder: an empty folder on the disk to measure.
    """
    found: dict[str, dict[float, list[float]]] = {}
    facts: list[Fact] = []
    for number, shape in shapes.items():
        place = Path(tempfile.mkdtemp(dir=folder))
        for name in _WAYS:
            if (lack := _lack(name, shape)) is not None:
                facts.append(lack)
                continue
            figures = _measured(name, shape, rounds, place)
            if not figures:
                what = f"not measured: {name} of {shape.title}"
                facts.append(Fact(what, "the near tier found no room", PAGE))
            for key, values in figures.items():
                found.setdefault(key, {})[number] = values
        shutil.rmtree(place)
    drawn = [
        Curve(chart if kind == "seconds" else f"{chart}-memory", what, unit, along, "measured", found[key])
        for key, (what, unit, kind) in _FIGURES.items()
        if key in found
    ]
    return [*drawn, *facts]


def _lack(name: str, shape: Shape) -> Fact | None:
    """Return that there is too little memory for something, which is then not measured."""
    need, left = _WAYS[name].states * shape.nbytes, machine.available_memory().nbytes
    if need <= left:
        return None
    what = f"not measured: {name} of {shape.title}"
    return Fact(what, f"{need / 1e9:.1f} GB needed, {left / 1e9:.1f} left", PAGE)


def _measured(name: str, shape: Shape, rounds: int, folder: Path) -> Figures:
    """Run one way in a process, or one for each worker."""
    workers = _WAYS[name].workers
    module = [sys.executable, "-m", "benchmarks.scale.one_state", name]
    numbers: Sequence[int] = (shape.layers, shape.width, rounds)
    command = [*(static(workers) if workers > 1 else []), *module, *map(str, numbers), str(folder)]
    environ = {"PATH": os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])}
    if workers > 1:
        environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
    with _near_folder(folder):
        job = Job(command, folder / f"{name}.log", environ)
        try:
            if job.wait(_PATIENCE):
                raise HvdrecoverError(f"{name} of {shape.title} failed; its log ends with\n{job.tail()}")
        finally:
            job.kill()
    found: Figures = json.loads((folder / f"{name}.json").read_text())
    return found


@contextmanager
def _near_folder(folder: Path) -> Iterator[None]:
    """Within this, there is a folder in memory for a near tier, whose name is in the file `NEAR`."""
    with tempfile.TemporaryDirectory(prefix="hvdrecover-benchmark-", dir=_SHARED) as near:
        (folder / NEAR).write_text(json.dumps(near))
        yield
