"""The summary of a run's events, also as metrics for Prometheus."""

from __future__ import annotations

import random

import pytest

from hvdrecover import events
from hvdrecover.reporting import summary, text
from hvdrecover.reporting.prometheus import Exporter
from hvdrecover.reporting.summary import PHASES, Tally
from tests.unit.reporting.runs import BEGIN, REPLACED, TWO, Run, example


def report_of(run):
    return summary.Run(events.read(run.folder)).report()


def recoveries(report):
    """Of each fault the generation in which it was recovered from, and the seconds that took."""
    return [
        (fault.recovery.generation, pytest.approx(fault.recovery.seconds, abs=1e-3))
        if fault.recovery
        else None
        for fault in report.faults
    ]


def test_a_fault_is_recovered_from_when_the_last_rank_steps_again(run):
    run.fault(40, rank=1, host="node-2", commit=[1, 3], exit=-9, steps=6, detail="SIGKILL")
    run.rendezvous(42, REPLACED, 2, 3)
    run.step(43, REPLACED, 2, 3, load=0.7)
    (fault,) = report_of(run).faults
    assert (fault.kind, fault.host, fault.rank, fault.exit, fault.steps) == ("crash", "node-2", 1, -9, 6)
    assert (fault.time, fault.detail) == (BEGIN + 40, "SIGKILL")
    recovery = fault.recovery
    assert (recovery.generation, recovery.commit, recovery.rank) == (2, 3, 1)
    assert recovery.seconds == pytest.approx(3.01)
    assert tuple(recovery.phases) == PHASES
    assert recovery.phases["load"] == 0.7
    assert sum(recovery.phases.values()) == pytest.approx(recovery.seconds)


@pytest.mark.parametrize("commits", [{}, {4: 43.2}])
def test_a_rendezvous_that_broke_before_all_had_stepped_is_no_recovery(run, commits):
    again = {0: ("node-1", 10), 1: ("node-2", 22)}
    run.fault(40, rank=1, host="node-2", commit=[1, 3])
    run.rendezvous(42, REPLACED, 2, 3)
    run.commit({0: REPLACED[0]}, 2, commits)  # as a script does that commits before its first step
    run.step(43, {0: REPLACED[0]}, 2, 3)
    run.fault(43.5, rank=1, host="node-2", commit=[2, 3])
    run.rendezvous(45, again, 3, 3)
    run.step(46, again, 3, 3)
    assert recoveries(report_of(run)) == [(3, 6.01), (3, 2.51)]


def test_where_all_trained_on_there_was_nothing_to_recover_from(run):
    run.fault(15, "lost_host", "node-3", rank=-1)  # a spare one, before two more commits
    report = report_of(run)
    assert report.faults[0].continued and report.faults[0].recovery is None
    assert report.kinds == {"lost_host": Tally(1, 1, None, None)}
    assert text.to_recover(report.faults[0]) == "training continued"
    assert text.tally_row("all", report.overall) == ["all", "1", "1", "training continued", ""]


def test_the_lost_process_s_commit_tells_what_a_fault_broke(run):
    # Noticed only when the others were already stepping again without it.
    run.fault(50, "lost_host", commit=[1, 3])
    run.rendezvous(42, {0: TWO[0]}, 2, 3)
    run.step(43, {0: TWO[0]}, 2, 3)
    assert recoveries(report_of(run)) == [(2, 0.0)]


def test_a_start_may_count_from_the_same_generation_again(run):
    anew = {0: ("node-1", 30), 1: ("node-2", 40)}
    run.fault(40, commit=[1, 3])
    run.report(41, "start", pid=5, attempt=2, command=["python"])
    run.rendezvous(44, anew, 1, 0, "initial")
    run.step(45, anew, 1, 0)
    run.fault(50, commit=[1, 0])
    run.rendezvous(52, anew, 2, 0)
    run.step(53, anew, 2, 0)
    report = report_of(run)
    assert recoveries(report) == [(1, 5.01), (2, 3.01)]
    assert report.starts == 2


def test_a_process_may_have_the_name_of_an_earlier_one(run):
    # In containers, hosts and pids repeat, so both append to the same files.
    run.fault(40, commit=[1, 3])
    run.rendezvous(44, TWO, 1, 0, "initial")
    run.step(45, TWO, 1, 0)
    run.commit(TWO, 1, {1: 50, 2: 55})
    report = report_of(run)
    assert recoveries(report) == [(1, 5.01)]
    assert report.commits_repeated == 3
    assert report.goodput == pytest.approx(11 / 55)


def test_commits_that_were_lost_do_not_count_whatever_generation_made_them(run):
    run.rendezvous(40, REPLACED, 2, 3)
    run.commit(REPLACED, 2, {4: 45, 5: 50})
    run.rendezvous(60, TWO, 3, 2, "durable")  # all memory was lost, and commit 2 was the newest durable one
    run.commit(TWO, 3, {3: 80})
    report = report_of(run)
    assert report.goodput == pytest.approx(((24 - 4) + 0 + (80 - 60)) / 80)
    assert report.commits_repeated == 3


def test_what_an_earlier_run_has_finished_is_not_lost(run):
    run.finish(35, TWO, 1, 3)
    run.report(36, "end", pid=5, code=0, reason="finished")
    run.report(40, "start", pid=6, attempt=1, command=["python"])
    run.rendezvous(50, REPLACED, 1, 0, "initial")
    run.commit(REPLACED, 1, {1: 70})
    report = report_of(run)
    assert report.goodput == pytest.approx(((34 - 4) + (70 - 50)) / 70)
    assert (report.commits_repeated, report.starts, report.outcome) == (0, 2, "open")


def test_outages(tmp_path):
    run = Run(tmp_path)
    told = {"pid": 10, "generation": 1}
    run.report(1, "durable", commit=1, bytes=1, seconds=0.1, **told)
    run.report(2, "write_failed", commit=2, error="full", attempt=1, **told)
    run.report(2.1, "outage", commit=2, error="full", age=1.0, **told)
    assert report_of(run).storage.outage == summary.Outage(BEGIN + 2, "full")
    run.report(5, "write_failed", commit=2, error="gone", attempt=2, **told)
    assert report_of(run).storage.outage == summary.Outage(BEGIN + 2, "gone")
    run.report(7, "durable", commit=3, bytes=1, seconds=0.1, **told)
    run.report(7, "outage_over", commit=3, attempts=2, seconds=4.9, age=6.0, **told)
    found = report_of(run).storage
    assert (found.outage, found.outages, found.outage_seconds, found.failures) == (None, 1, 4.9, 2)
    run.report(8, "write_failed", commit="g0001-c00000001", error="a mark", pid=10)
    assert report_of(run).storage.outage is None
    run.report(
        9, "write_failed", commit=4, error="fenced", attempt=1, **told
    )  # permanently, without an outage
    assert report_of(run).storage.outage == summary.Outage(BEGIN + 9, "fenced")


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_was_followed_is_reported_as_one_that_is_read_at_once(tmp_path, seed):
    """Events of different processes arrive in any order within a short time."""
    example(tmp_path)
    found = events.read(tmp_path)
    shaken = random.Random(seed)
    late = sorted(found, key=lambda event: event.time + (shaken.uniform(0, 0.04) if event.pid != 10 else 0))
    followed = summary.Run()
    for event in late:
        followed.take(event)
    assert followed.report() == summary.Run(found).report()


def exported(exporter, run):
    """Name and label values to the value, of all samples, once the exporter has seen the run."""
    exporter.update(report_of(run))
    found = [sample for family in exporter.registry.collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def test_the_numbers_of_a_run_are_exported_and_totals_never_go_back(tmp_path):
    """The step of a rank whose events are late shows that the others had not recovered yet."""
    run, exporter = example(tmp_path / "more"), Exporter("runs/1")
    run.report(105, "durable", pid=11, generation=3, commit=7, bytes=1000, seconds=1.5)
    before = exported(exporter, run)
    expected = {
        ("hvdrecover_run_info", "runs/1"): 1,
        ("hvdrecover_commits_total",): 7,
        ("hvdrecover_durable_write_seconds_total",): 1.5,
        ("hvdrecover_process_restarts_total", "true"): 1,
        ("hvdrecover_faults_total", "crash"): 1,
        ("hvdrecover_faults_total", "out_of_memory"): 0,
        ("hvdrecover_recovery_seconds_sum",): pytest.approx(23.02),
        ("hvdrecover_activity", "training"): 0,
        ("hvdrecover_last_durable_commit_timestamp_seconds",): BEGIN + 103.5,
    }
    assert {name: before.get(name) for name in expected} == expected

    less = Run(tmp_path / "less")
    less.rendezvous(1, TWO, 1, 0)
    after = exported(exporter, less)
    totals = [name for name in before if name[0].endswith(("_total", "_count", "_sum"))]
    assert len(totals) > 20
    assert [after[name] for name in totals] == [before[name] for name in totals]
    assert after["hvdrecover_last_commit",] == 0
