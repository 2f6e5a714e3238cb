"""The metrics that Prometheus gets to see of a run."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hvdrecover.record import read
from hvdrecover.reporting import summary
from hvdrecover.reporting.prometheus import Exporter
from tests.unit.reporting.runs import BEGIN, TWO, Run, example


def status_of(folder):
    return summary.Run(read(folder)).report()


def samples(text):
    """Name and label values to the value, of all samples."""
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


@pytest.fixture
def exporter():
    return Exporter("runs/1")


@pytest.fixture
def exported(exporter, tmp_path):
    """The text that an exporter exports once it has been handed the status of the run in the folder."""

    def exported():
        exporter.update(status_of(tmp_path))
        return generate_latest(exporter.registry).decode()

    return exported


def test_the_numbers_of_a_run(exported, tmp_path):
    run = example(tmp_path)
    run.report(105, "durable", pid=11, generation=3, commit=7, bytes=1000, seconds=1.5)
    found = samples(exported())
    expected = {
        ("hvdrecover_run_info", "runs/1"): 1,
        ("hvdrecover_commits_total",): 7,
        ("hvdrecover_durable_write_seconds_total",): 1.5,
        ("hvdrecover_process_restarts_total", "true"): 1,
        ("hvdrecover_process_restarts_total", "false"): 1,
        ("hvdrecover_faults_total", "crash"): 1,
        ("hvdrecover_faults_total", "out_of_memory"): 0,
        ("hvdrecover_host_faults_total", "node-1"): 1,
        ("hvdrecover_recovery_seconds_sum",): pytest.approx(23.02),
        ("hvdrecover_activity", "finished"): 1,
        ("hvdrecover_activity", "training"): 0,
        ("hvdrecover_last_commit_timestamp_seconds",): BEGIN + 102,
        ("hvdrecover_last_durable_commit_timestamp_seconds",): BEGIN + 103.5,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_totals_never_go_back(exporter, tmp_path):
    """The step of a rank whose events are late shows that the others had not recovered yet."""
    example(tmp_path / "more")
    Run(tmp_path / "less").rendezvous(1, TWO, 1, 0)
    exporter.update(status_of(tmp_path / "more"))
    before = samples(generate_latest(exporter.registry).decode())
    exporter.update(status_of(tmp_path / "less"))
    after = samples(generate_latest(exporter.registry).decode())
    totals = [name for name in before if name[0].endswith(("_total", "_count", "_sum"))]
    assert len(totals) > 20
    assert [after[name] for name in totals] == [before[name] for name in totals]
    assert after["hvdrecover_last_commit",] == 0
