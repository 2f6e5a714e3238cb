"""The status of a run for Prometheus: an endpoint, or a file for node_exporter's textfile collector.

This module takes ``prometheus_client``, of the extra ``prometheus``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import ConfigError
from hvdrecover.reporting import metrics
from hvdrecover.reporting.metrics import Series
from hvdrecover.reporting.status import Status

_PREFIX = "hvdrecover_"


@dataclass(frozen=True)
class _Exported:
    """The status that is exported."""

    status: Status
    totals: Mapping[str, Series]
    recoveries: int
    recovery_seconds: float


class Exporter:
    """Metrics of a run, as they stood at the last update.

    Args:
        run: the run's name.
        clock: where the time of a scrape comes from; None leaves out what changes without any event.
    """

    def __init__(self, run: str, clock: Clock | None = SYSTEM_CLOCK) -> None:
        self._run = run
        self._clock = clock
        self._exported: _Exported | None = None
        self._seen = threading.Event()
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, status: Status) -> None:
        """Export this status from now on.

        An event that comes late may take back what followed from others; a total stays where it was then.
        """
        if (before := self._exported) is not None and before.status == status:
            return
        totals = {each.name: each for each in metrics.totals(status)}
        count, seconds = metrics.recoveries(status)
        if before is not None:
            totals = {name: _grown(each, before.totals[name]) for name, each in totals.items()}
            count, seconds = max(count, before.recoveries), max(seconds, before.recovery_seconds)
        self._exported = _Exported(status, totals, count, seconds)
        self._seen.clear()

    def wait_until_seen(self, timeout: float) -> None:
        """Wait for a scrape of what was updated last, for so many seconds at most."""
        self._seen.wait(timeout)

    def collect(self) -> Iterator[Metric]:
        """The metrics; called at each scrape, by another thread."""
        info = Series("run_info", "The run whose status these are.", {self._run: 1}, "run")
        yield _family(GaugeMetricFamily, info)
        if (exported := self._exported) is None:
            return
        for each in exported.totals.values():
            yield _family(CounterMetricFamily, each)
        for each in metrics.gauges(exported.status):
            yield _family(GaugeMetricFamily, each)
        for each in metrics.of_the_moment(exported.status, self._clock.now()) if self._clock else ():
            yield _family(GaugeMetricFamily, each)
        help = "From a fault until all ranks were stepping again; one for each fault that was recovered from."
        count, seconds = exported.recoveries, exported.recovery_seconds
        yield SummaryMetricFamily(f"{_PREFIX}recovery_seconds", help, count_value=count, sum_value=seconds)
        if exported is self._exported:
            self._seen.set()


def write(exporter: Exporter, file: Path) -> None:
    """Write the metrics to a file, which is replaced as a whole.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        write_to_textfile(os.fspath(file), exporter.registry)
    except OSError as error:
        raise ConfigError("--prometheus", f"'{file}' can't be written: {error.strerror}") from error


@contextmanager
def serving(exporter: Exporter, host: str, port: int) -> Iterator[int]:
    """Serve the metrics over HTTP, at every path.

    Args:
        exporter: where they come from.
        host: the name or address to listen at; empty for all of this host's IPv4 addresses.
        port: the port; 0 for a free one.

    Gives:
        The port.

    Raises:
        ConfigError: it can't be listened at.
    """
    try:
        server, thread = start_http_server(port, host or "0.0.0.0", exporter.registry)
    except OSError as error:
        where = f"'{host}:{port}' can't be listened at: {error.strerror}"
        raise ConfigError("--prometheus", f"{where}; name another HOST:PORT") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _grown(series: Series, before: Series) -> Series:
    values = {key: max(value, before.values.get(key, 0.0)) for key, value in series.values.items()}
    return replace(series, values={**before.values, **values})


def _family(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], series: Series) -> Metric:
    family = kind(f"{_PREFIX}{series.name}", series.help, labels=[series.label] if series.label else [])
    for value, number in series.values.items():
        family.add_metric([value] if series.label else [], number)
    return family
