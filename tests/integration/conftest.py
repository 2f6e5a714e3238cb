"""Real jobs: started here, and gone at the end of each test, whatever happened in it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.jobs import DigitsRun, Job, near_folder, static

# What takes minutes and differs little from what runs always.
IS_LONG = os.environ.get("LONG") == "1"
LONG = pytest.mark.skipif(not IS_LONG, reason="takes minutes; LONG=1 scripts/test runs it")
TENSORFLOW_IF_LONG = ["torch", pytest.param("tensorflow", marks=LONG)]

# Ranks ask each other every so many milliseconds what there is to do: by Horovod's default of 1 that takes
# 5 % of a core each, also of those that wait, and many jobs run at once.
CYCLE = "HOROVOD_CYCLE_TIME"

# Variables of a job in which frameworks are imported as a user's job does, with all that they bring along.
WHOLE = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}

# Variables of all others: their processes import less, which is most of what they compute, and wait for each
# other in peace. See `light/sitecustomize.py`.
LIGHT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).with_name("light")), *WHOLE.values()])),
    CYCLE: "5",
}

# Variables of a job whose script loads scikit-learn's digits.
SKLEARN = {"LIGHT_KEEPS": "sklearn"}

Start = Callable[..., Job]
Finished = Callable[..., DigitsRun]


@pytest.fixture(autouse=True, scope="module")
def light() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LIGHT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share two cores; and sums are the same only with the same number of threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def a_users_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests import the adapter into this process, which chooses a controller for it."""
    for name in {name for name in os.environ if name.startswith(("HVDRECOVER_", "HOROVOD_"))} - {CYCLE}:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def no_near_root_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A job that does not finish leaves its newest commits in the host's memory, for its next start."""
    yield
    for owner in near_folder().glob("*/root.json"):
        with suppress(FileNotFoundError):  # those of other jobs come and go
            if f"{tmp_path_factory.getbasetemp()}/" in owner.read_text():
                shutil.rmtree(owner.parent)
    with suppress(OSError):  # near roots of other jobs are there, or none was made
        near_folder().rmdir()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Collects the jobs that a test starts, and ends their processes after the test."""
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


@pytest.fixture
def start(jobs: list[Job]) -> Start:
    """Starts a `DigitsRun`, and ends what is left of it after the test."""

    def start_run(
        run: DigitsRun, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> Job:
        jobs.append(run.start(launcher, environ))
        return jobs[-1]

    return start_run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Runs of two workers that nothing happens to, each made once for all test processes: only read them."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def finish(epochs: int, framework: str, *options: str) -> DigitsRun:
        folder = base / "-".join(["undisturbed", framework, str(epochs), *options])
        run = DigitsRun(folder, epochs, *options, framework=framework)
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "finished").exists():
                run.finish(run.start(static(2), {"OMP_NUM_THREADS": "1", **LIGHT}))
                (folder / "finished").touch()
        return run

    return finish


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A host file that names this host twice, so that Horovod sees two hosts."""
    path = tmp_path / "hosts"
    path.write_text("localhost:1\n127.0.0.1:1\n")
    return path
