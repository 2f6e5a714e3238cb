"""A run that goes from fault to fault; each is a short pause, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Finished
from tests.support.commands import call
from tests.support.faulty_run import (
    EPOCHS,
    FaultyRun,
    assert_each_sample_once,
    assert_same_weights,
    wait_for_durable,
    wait_until_all_train,
)
from tests.support.jobs import DigitsRun, Job, kill, supervised

CALM = 6  # commits between faults; a standby is there by then, or is being made

# Seconds, for one that is slow: the first test waits for the story
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


@dataclass
class Fault:
    before: tuple[int, int]  # processes of ranks 0 and 1
    after: tuple[int, int]  # those that continued
    generation: int  # which it ended
    events: list[dict[str, Any]]


@dataclass
class Story:
    run: FaultyRun
    faults: dict[str, Fault] = field(default_factory=dict)  # by name
    orphans: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The run: SIGKILL of rank 0, of both, of rank 1, SIGSTOP, an endless loop, a deadlock."""
    folder = tmp_path_factory.mktemp("story")
    scripted = {"loop": "loop step 1 36", "deadlock": "deadlock step 0 43"}
    told = Story(FaultyRun(folder, "torch", [*scripted.values()]))
    run = told.run
    # Without the near tier, lost processes resume from the durable commit.
    environ = {"OMP_NUM_THREADS": "1", "HVDRECOVER_NEAR": "off"}
    job = run.start(supervised("--hang-timeout", "30"), environ)
    try:
        _strike(told, job, "rank 0", CALM, lambda: kill(run.process_of(0)))
        _strike(told, job, "both", 2 * CALM, lambda: [kill(pid) for pid in _processes(run)])
        _strike(told, job, "rank 1", 3 * CALM, lambda: kill(run.process_of(1)))
        _strike(told, job, "stopped", 4 * CALM, lambda: os.kill(run.process_of(1), signal.SIGSTOP))
        for name, line in scripted.items():
            _strike(told, job, name, int(line.split()[-1]), lambda: None)
        assert job.wait(400) == 0, job.tail()
        told.orphans = job.processes()
        yield told
    finally:
        job.kill()


def _processes(run: DigitsRun) -> tuple[int, int]:
    return run.process_of(0), run.process_of(1)


def _strike(told: Story, job: Job, name: str, commit: int, strike: Callable[[], object]) -> None:
    """Let a fault strike at a commit, and wait until both ranks train again."""
    run = told.run
    wait_for_durable(run, job, commit)
    before, generation = _processes(run), max(run.generations())
    strike()
    wait_until_all_train(run, job, generation)
    known = sum(len(fault.events) for fault in told.faults.values())
    told.faults[name] = Fault(before, _processes(run), generation, run.events("fault", "stacks")[known:])


def test_the_run_ends_well_under_its_first_start(story: Story) -> None:
    assert len(story.run.events("start")) == 1
    (end,) = story.run.events("end")
    assert end["code"] == 0
    assert story.orphans == []


def test_its_weights_are_those_of_an_undisturbed_run(story: Story, finished: Finished) -> None:
    assert_same_weights(story.run, finished(EPOCHS, "torch"))


def test_each_sample_is_trained_on_once(story: Story) -> None:
    assert_each_sample_once(story.run, padding=1)


def test_a_killed_rank_is_restarted_in_place_and_takes_the_others_state(story: Story) -> None:
    for rank in (0, 1):
        fault = story.faults[f"rank {rank}"]
        assert fault.before[1 - rank] in fault.after  # the other one lives, perhaps under another rank
        assert fault.before[rank] not in fault.after
        (event,) = fault.events
        assert (event["fault"], event["exit"], event["rank"]) == ("crash", -signal.SIGKILL, rank)
        assert story.run.sources()[fault.generation + 1] == "memory"


def test_when_both_are_killed_a_commit_is_read_without_a_restart_of_the_job(story: Story) -> None:
    fault = story.faults["both"]
    assert not set(fault.before) & set(fault.after)
    later = {source for number, source in story.run.sources().items() if number > fault.generation}
    assert "durable" in later


def test_a_stopped_process_is_killed_as_one_that_hangs(story: Story) -> None:
    fault = story.faults["stopped"]
    assert fault.before[0] in fault.after
    assert [event["fault"] for event in fault.events if event["kind"] == "fault"] == ["hang"]
    assert fault.events[-1]["rank"] == 1
    assert story.run.sources()[fault.generation + 1] == "memory"


def test_of_a_hang_only_the_culprit_is_killed_and_its_line_is_named(story: Story) -> None:
    for name, rank in (("loop", 1), ("deadlock", 0)):
        fault = story.faults[name]
        *_, stacks, event = fault.events
        assert (event["fault"], event["rank"]) == ("hang", rank)
        assert fault.before[1 - rank] in fault.after
        assert f"in hang_in_a_{name}" in stacks["summary"]
        assert f"hang_in_a_{name}" in Path(stacks["file"]).read_text()
        assert f"rank {rank} on localhost is at {stacks['summary']}" in story.run.log
        assert re.search(rf"waited \d+ s for rank {rank}\b", story.run.log)
        assert story.run.sources()[fault.generation + 1] == "memory"


def test_the_report_has_the_faults_as_text_as_one_page_and_as_metrics(story: Story, tmp_path: Path) -> None:
    page, metrics = tmp_path / "report.html", tmp_path / "run.prom"
    done = call("report", story.run.folder / "events", "--html", page, "--prometheus", metrics)
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, page.read_text()):
        assert "crash" in text and "hang" in text and "finished" in text
    assert "<svg" in page.read_text() and "<script" not in page.read_text()  # the time line
    kinds = [fault.events[-1]["fault"] for fault in story.faults.values()]
    hangs = re.findall(r'^hvdrecover_faults_total\{.*"hang".*\} (\d+)', metrics.read_text(), re.MULTILINE)
    assert hangs == [str(kinds.count("hang"))]
