"""Jobs on a device, whose workers are killed, and end with the very bits of one that was not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import drill
from tests.support.jobs import DigitsRun, supervised

SCRIPT = Path(__file__).with_name("digits.py")
EPOCHS = 2
OPTIONS = ("--step-seconds", "0.04")


def run(folder: Path) -> DigitsRun:
    return DigitsRun(folder, EPOCHS, *OPTIONS, program=[str(SCRIPT)])


@pytest.fixture(autouse=True, scope="module")
def a_users_shell() -> Iterator[None]:
    """Other tests import the adapter into this process, which chooses a controller for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HVDRECOVER_", "HOROVOD_"))]:
            patch.delenv(name)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield


@pytest.fixture(scope="module")
def undisturbed(a_users_shell: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, DigitsRun]:
    """A run that nothing happens to, by its number of workers."""
    runs = {workers: run(tmp_path_factory.mktemp("undisturbed")) for workers in (1, 2)}
    for workers, clean in runs.items():
        clean.finish(clean.start(supervised(workers=workers)))
    return runs


@pytest.mark.parametrize(("workers", "killed"), [(1, [0]), (2, [1]), (2, [0, 1])])
def test_workers_that_are_killed_end_with_the_same_bits(
    undisturbed: dict[int, DigitsRun], start: Any, tmp_path: Path, workers: int, killed: list[int]
) -> None:
    disturbed = run(tmp_path)
    job = start(disturbed, supervised(workers=workers))
    disturbed.wait_for(job, lambda batch: batch.epoch == 1 and batch.rank == workers - 1)
    for rank in killed:
        os.kill(disturbed.process_of(rank), signal.SIGKILL)
    disturbed.finish(job)
    assert "resum" in disturbed.log
    assert disturbed.digest() == undisturbed[workers].digest()


def test_a_drill_on_the_device_finds_that_the_script_recovers(tmp_path: Path) -> None:
    script = (sys.executable, SCRIPT, "--epochs", EPOCHS, *OPTIONS)
    done = drill(tmp_path / "drill", "--faults", "kill,kill-all", "--seed", 1, "--", *script)
    assert (done.code, done.found["recovers"], done.found["findings"]) == (0, True, []), done.words
