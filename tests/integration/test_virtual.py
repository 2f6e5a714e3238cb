"""Jobs of four virtual ranks end with the very same state, whichever processes carry them out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from tests.integration.conftest import LONG, Start
from tests.support.commands import wait_until
from tests.support.jobs import DigitsRun, Job, durable, elastic, read_events, static

SCRIPT = Path(__file__).with_name("scripts") / "virtual_digits.py"
EPOCHS = 6  # of 6 steps
NEVER = 99  # processes
# Names of this host, each of which is another to Horovod; it gives up one on which a process was killed.
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "0x7f.1", "0x7f.0.1", "0177.1", "0177.0.1")

pytestmark = pytest.mark.acceptance


class VirtualRun(DigitsRun):
    def __init__(self, folder: Path, optimizer: str = "adamw", *options: str) -> None:
        words = ("--virtual-ranks", "4", "--optimizer", optimizer, *options)
        super().__init__(folder, EPOCHS, *words, program=(str(SCRIPT),))
        self.optimizer = optimizer
        self._hosts = folder / "hosts"

    def begin(
        self, start: Start, launcher: Sequence[str], shares: str = "equal", **plan: Mapping[str, Any]
    ) -> Job:
        environ = {"PLAN": json.dumps(plan), "HOSTS": str(self._hosts), "SHARES": shares}
        return start(self, launcher, environ)

    def finish_with(
        self, start: Start, launcher: Sequence[str], shares: str = "equal", **plan: Mapping[str, Any]
    ) -> VirtualRun:
        self.finish(self.begin(start, launcher, shares, **plan))
        return self

    def elastic(self, count: int) -> list[str]:
        self._hosts.write_text(on(*range(count)))
        return elastic(self._hosts, count)

    def shares(self) -> list[list[int]]:
        """Return how many virtual ranks each process had, from time to time."""
        every = [event["counts"] for event in read_events(self.folder / "events", "shares")]
        return [each for each, before in zip(every, [None, *every], strict=False) if each != before]

    def final(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The tensors of the last commit, and all else that it holds of the result."""
        *_, last = sorted(self.root.glob("g*/MANIFEST.json"))
        manifest = json.loads(last.read_text())
        assert manifest["finished"]
        files = {path.stem: safetensors.numpy.load_file(path) for path in last.parent.glob("*.safetensors")}
        tensors = {
            f"{file}.{name}": each.tobytes() for file, own in files.items() for name, each in own.items()
        }
        return tensors, {key: each for key, each in manifest["state"].items() if key != "random"}


def on(*numbers: int) -> str:
    """Return the lines of a host file that names some of the hosts."""
    return "".join(f"{HOSTS[number]}:1\n" for number in numbers)


def assert_same(run: VirtualRun, clean: VirtualRun) -> None:
    """Both have ended with the same weights, buffers, optimizer state, schedule and losses of each sample."""
    (mine, rest), (theirs, others) = run.final(), clean.final()
    assert mine.keys() == theirs.keys()
    assert [name for name in theirs if mine[name] != theirs[name]] == []
    assert rest["attributes"] == others["attributes"]
    assert rest == others


@pytest.fixture(scope="module", params=["adamw", pytest.param("sgd", marks=LONG)])
def clean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VirtualRun:
    """A run of a process for each virtual rank, to which nothing happens."""
    run = VirtualRun(tmp_path_factory.mktemp("clean"), request.param)
    run.finish(run.start(static(4), {"OMP_NUM_THREADS": "1"}))
    return run


def test_one_process_has_seen_all_samples_and_ends_with_the_same(
    clean: VirtualRun, start: Start, tmp_path: Path
) -> None:
    run = VirtualRun(tmp_path, clean.optimizer).finish_with(start, ())
    assert run.shares() == [[4]]
    assert_same(run, clean)
    (losses,) = [run.final()[1]["attributes"]["losses"]["$dict"]]
    for epoch in range(EPOCHS):
        seen = Counter(
            sample for _, own in losses for number, samples, _ in own if number == epoch for sample in samples
        )
        assert (set(seen), seen.total()) == (set(range(330)), 332)  # two are padding


@pytest.mark.parametrize("processes", [pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
def test_fewer_processes_end_with_the_same(
    processes: int, clean: VirtualRun, start: Start, tmp_path: Path
) -> None:
    run = VirtualRun(tmp_path, clean.optimizer).finish_with(start, static(processes))
    assert_same(run, clean)


def test_processes_that_are_killed_and_new_ones_end_with_the_same(
    clean: VirtualRun, start: Start, tmp_path: Path
) -> None:
    run = VirtualRun(tmp_path, clean.optimizer)
    run.finish_with(
        start,
        run.elastic(4),
        kill={"7": [0, 1, 3], "18": [0]},
        hosts={"12": [3, on(0, 1, 2, 3, 4, 5)], "25": [4, on(*range(8))]},
    )
    assert run.shares() == [[1, 1, 1, 1], [4], [2, 1, 1], [2, 2], [1, 1, 1, 1]]
    assert_same(run, clean)


def test_by_speed_and_another_number_of_processes_after_a_restart_end_with_the_same(
    clean: VirtualRun, start: Start, tmp_path: Path
) -> None:
    run = VirtualRun(tmp_path, clean.optimizer)
    job = run.begin(start, static(2), "by-speed", slow={"0": 1, "10": 0}, hosts={"27": [NEVER, ""]})
    wait_until(lambda: durable(run.root) > 27 // 5)
    job.kill()
    assert len(run.shares()) >= 3
    run.finish_with(start, ())
    assert run.shares()[-1] == [4]
    assert_same(run, clean)
