"""The metrics that Prometheus gets to see of a run."""

from __future__ import annotations

import pytest

from hvdrecover.events import read
from hvdrecover.reporting import summary
from hvdrecover.reporting.prometheus import Exporter
from tests.unit.reporting.runs import BEGIN, TWO, Run, example


def exported(exporter, run):
    """Name and label values to the value, of all samples, once the exporter has seen the run."""
    exporter.update(summary.Run(read(run.folder)).report())
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
