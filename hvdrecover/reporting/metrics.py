"""The status of a run as metrics, by the conventions of Prometheus: base units, and totals that only grow.

Labels have few values: kinds of faults, hosts, and what a run may be at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hvdrecover.reporting.status import RECENT, Status

_ACTIVITIES = ("starting", "training", "recovering", "finished", "ended")
_FAULTS = (
    "crash",
    "hang",
    "out_of_memory",
    "preemption",
    "lost_host",
    "launcher_lost",
    "script_error",
    "early_exit",
)
_OTHER = "other"


@dataclass(frozen=True)
class Series:
    """A metric.

    Attributes:
        name: without what all names begin with, and without ``_total``.
        help: what it counts.
        values: label value to number; a metric without a label has one, whose label value is empty.
        label: the name of the label, or empty.
    """

    name: str
    help: str
    values: Mapping[str, float]
    label: str = ""


def totals(status: Status) -> list[Series]:
    """Return what only grows."""
    return [
        _series("commits", "Commits that the job has made, those made again included.", status.commits),
        _series("durable_commits", "Commits that have become durable.", status.durables),
        _series("durable_bytes", "Bytes of the commits that have become durable.", status.durable_bytes),
        _series("durable_write_seconds", "Time spent on writing these commits.", status.durable_seconds),
        _series("write_failures", "Attempts to write a commit that failed.", status.write_failures),
        _series("storage_outages", "Outages of the storage that have begun.", status.outages),
        _series("storage_outage_seconds", "Length of the outages that are over.", status.outage_seconds),
        _series("job_starts", "Starts of the whole job.", status.starts),
        Series(
            "process_restarts",
            "Restarts of one process in its place; warm if a standby took over.",
            {"true": status.warm, "false": status.restarts - status.warm},
            "warm",
        ),
        _series("given_up", "Slots and jobs that were given up.", len(status.given_up)),
        Series("faults", "Faults by kind.", _by_kind(status), "kind"),
        Series("host_faults", "Faults by the host that told of them.", _by_host(status), "host"),
        _series("repeated_steps", "Steps done again, as no commit held them.", status.steps_repeated),
        _series("event_lines_passed_over", "Lines of event files that are not events.", status.passed_over),
    ]


def gauges(status: Status) -> list[Series]:
    """Return what stands until the next event; what is not known yet is left out."""
    agreement, commit, durable = status.agreement, status.commit, status.durable
    activity: dict[str, float] = {each: each == status.activity for each in _ACTIVITIES}
    found = [
        Series("activity", "1 for what the run is at, 0 for what it is not.", activity, "activity"),
        _series("begin_timestamp_seconds", "When the run began.", status.begin),
        _series("last_event_timestamp_seconds", "When the last event happened.", status.last),
        _series("storage_outage", "1 while commits can't be made durable.", status.outage is not None),
    ]
    if agreement is not None:
        found.append(_series("ranks", "Ranks of the last rendezvous.", agreement.ranks))
        found.append(_series("generation", "Generation that the ranks are in.", agreement.generation))
    if status.epoch is not None:
        help = "Newest epoch that events name, which they do if its last batch is padded or cut."
        found.append(_series("epoch", help, status.epoch))
    if commit is not None:
        found.append(_series("last_commit", "Number of the newest commit.", commit.number))
        found.append(_series("last_commit_timestamp_seconds", "When it was made.", commit.time))
    if durable is not None:
        found.append(_series("last_durable_commit", "Number of the newest durable commit.", durable.number))
        help = "When the writing of the newest durable commit began."
        found.append(_series("last_durable_commit_timestamp_seconds", help, durable.time))
    return found


def of_the_moment(status: Status, now: float) -> list[Series]:
    """Return what changes without any event, and so is of no use in a file."""
    found = [_age("last_event_age_seconds", "Time since the last event.", status.last, now)]
    if status.commit is not None:
        help = "Time since the newest commit was made."
        found.append(_age("last_commit_age_seconds", help, status.commit.time, now))
    if status.durable is not None:
        help = "Time since the writing of the newest durable commit began."
        found.append(_age("last_durable_commit_age_seconds", help, status.durable.time, now))
    rate = status.rate(now)
    if rate is not None:
        help = f"Commits per second since the oldest of the newest {RECENT}."
        found.append(_series("commits_per_second", help, rate))
    return found


def recoveries(status: Status) -> tuple[int, float]:
    """Return how many faults were recovered from, and the seconds from each until all ranks stepped."""
    seconds = [fault.recovery.seconds for fault in status.faults if fault.recovery is not None]
    return len(seconds), sum(seconds)


def _series(name: str, help: str, value: float) -> Series:
    return Series(name, help, {"": value})


def _age(name: str, help: str, time: float, now: float) -> Series:
    return _series(name, help, max(now - time, 0.0))


def _by_kind(status: Status) -> dict[str, float]:
    """All kinds are there from the beginning, so that the first fault of a kind is seen as an increase."""
    kinds = Counter(fault.kind if fault.kind in _FAULTS else _OTHER for fault in status.faults)
    return {kind: kinds[kind] for kind in (*_FAULTS, _OTHER)}


def _by_host(status: Status) -> dict[str, float]:
    hosts = Counter(fault.host for fault in status.faults)
    return {host: hosts[host] for host in status.hosts}
