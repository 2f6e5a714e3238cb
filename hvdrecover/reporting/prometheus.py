"""A run as metrics for Prometheus: an endpoint, or a file for node_exporter's textfile collector.

As Prometheus asks, metrics have base units, totals only grow, and labels have few values.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from hvdrecover.errors import ConfigError
from hvdrecover.reporting.summary import Report

_PREFIX = "hvdrecover_"
_ACTIVITIES = ("starting", "training", "recovering", "finished", "ended")
_KINDS = (
    *("crash", "hang", "out_of_memory", "preemption", "lost_host", "launcher_lost", "script_error"),
    *("early_exit", "other"),
)


class Exporter:
    """Metrics of a run, as they stood at the last update."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._report: Report | None = None
        self._totals: dict[tuple[str, str], float] = {}
        self.seen = threading.Event()  # whether the last update has been scraped
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, report: Report) -> None:
        if report != self._report:
            self._report = report
            self.seen.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called at each scrape, by another thread."""
        yield _family(GaugeMetricFamily, "run_info", "The run whose status these are.", {self._run: 1}, "run")
        if (report := self._report) is None:
            return
        for name, help, value, label in _totals(report):
            values = value if isinstance(value, Mapping) else {"": value}
            grown = {key: self._grown(name, key, number) for key, number in values.items()}
            yield _family(CounterMetricFamily, name, help, grown, label)
        for name, help, value, label in _gauges(report):
            if value is not None:
                yield _family(GaugeMetricFamily, name, help, value, label)
        help = "From a fault until all ranks were stepping again; one for each fault that was recovered from."
        seconds = [fault.recovery.seconds for fault in report.faults if fault.recovery is not None]
        count = int(self._grown("recovery", "count", len(seconds)))
        total = self._grown("recovery", "sum", sum(seconds))
        yield SummaryMetricFamily(f"{_PREFIX}recovery_seconds", help, count_value=count, sum_value=total)
        if report is self._report:
            self.seen.set()

    def _grown(self, name: str, key: str, value: float) -> float:
        """A late event may take back a recovery. Prometheus would take a smaller total for a restart."""
        grown = self._totals[name, key] = max(value, self._totals.get((name, key), 0.0))
        return grown


# Name and help of a metric; its value, unknown if None, or a value for each value of a label; the label.
_Row = tuple[str, str, Any, str]


def _totals(report: Report) -> list[_Row]:
    storage = report.storage
    restarts = {"true": report.warm_restarts, "false": report.restarts - report.warm_restarts}
    # All kinds are there from the beginning, so the first fault of a kind is an increase.
    kinds = Counter(fault.kind if fault.kind in _KINDS else "other" for fault in report.faults)
    hosts = Counter(fault.host for fault in report.faults)
    by_host = {host: hosts[host] for host in report.hosts}
    return [
        ("commits", "Commits that the job has made, those made again included.", report.commits, ""),
        ("durable_commits", "Commits that have become durable.", storage.commits, ""),
        ("durable_bytes", "Bytes of the commits that have become durable.", storage.bytes, ""),
        ("durable_write_seconds", "Time spent on writing these commits.", storage.seconds, ""),
        ("write_failures", "Attempts to write a commit that failed.", storage.failures, ""),
        ("storage_outages", "Outages of the storage that have begun.", storage.outages, ""),
        ("storage_outage_seconds", "Length of the outages that are over.", storage.outage_seconds, ""),
        ("job_starts", "Starts of the whole job.", report.starts, ""),
        ("given_up", "Slots and jobs that were given up.", len(report.given_up), ""),
        ("repeated_steps", "Steps done again, as no commit held them.", report.steps_repeated, ""),
        ("process_restarts", "Restarts of one process; warm if by a standby.", restarts, "warm"),
        ("faults", "Faults by kind.", {kind: kinds[kind] for kind in _KINDS}, "kind"),
        ("host_faults", "Faults by the host that told of them.", by_host, "host"),
    ]


def _gauges(report: Report) -> list[_Row]:
    commit, durable = report.commit, report.storage.durable
    activity = {each: float(each == report.activity) for each in _ACTIVITIES}
    outage, last = float(report.storage.outage is not None), "last_durable_commit"
    began = "When the writing of the newest durable commit began."
    return [
        ("activity", "1 for what the run is at, 0 for what it is not.", activity, "activity"),
        ("begin_timestamp_seconds", "When the run began.", report.begin, ""),
        ("storage_outage", "1 while commits cannot be made durable.", outage, ""),
        ("ranks", "Ranks of the last rendezvous.", report.ranks, ""),
        ("generation", "Generation that the ranks are in.", commit and commit.generation, ""),
        ("last_commit", "Number of the newest commit.", commit and commit.number, ""),
        (last, "Number of the newest durable commit.", durable and durable.number, ""),
        ("last_event_timestamp_seconds", "When the last event happened.", report.end, ""),
        ("last_commit_timestamp_seconds", "When it was made.", commit and commit.time, ""),
        (f"{last}_timestamp_seconds", began, durable and durable.time, ""),
    ]


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help: str, value: Any, label: str
) -> Metric:
    family = kind(_PREFIX + name, help, labels=[label] if label else [])
    for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([key] if label else [], number)
    return family


def write(exporter: Exporter, file: Path) -> None:
    try:
        write_to_textfile(os.fspath(file), exporter.registry)
    except OSError as error:
        raise ConfigError("--prometheus", f"'{file}' cannot be written: {error.strerror}") from error


@contextmanager
def serving(exporter: Exporter, host: str, port: int) -> Iterator[int]:
    """Serve the metrics by HTTP, at all addresses if ``host`` is empty; yield the port, a free one for 0."""
    try:
        server, thread = start_http_server(port, host or "0.0.0.0", exporter.registry)
    except OSError as error:
        problem = f"'{host}:{port}' is not available: {error.strerror}; name another HOST:PORT"
        raise ConfigError("--prometheus", problem) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
