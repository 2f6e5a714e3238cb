"""The status of a run that is under way, event by event.

They do not depend on the order in which files are read, only on that of the lines in each of them. Faults and
recoveries are those of `summary`. It is asked anew only after an event that may change them, and is told of a
process's first commits only, so that weeks of commits cost neither time nor memory.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from hvdrecover.record import Event
from hvdrecover.reporting.clocks import COMMITS
from hvdrecover.reporting.reading import Process
from hvdrecover.reporting.records import Log
from hvdrecover.reporting.status import RECENT, Agreement, Commit, Outage, Status
from hvdrecover.reporting.summary import Report, summarise

_STRUCTURE = frozenset(
    {"start", "end", "fault", "restart", "gave_up", "sync", "recovered", "reset", "finished"}
)

Clocks = Mapping[str, float]
"""Host to how many seconds its clock is ahead."""


Found = tuple[float, tuple[Any, ...]]
"""The time of an event, and its fields."""


class _Newest:
    """The newest event of each kind, by hosts, as their clocks may turn out to be wrong."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[str, str], Found]] = defaultdict(dict)

    def put(self, kind: str, event: Event, values: tuple[Any, ...] = (), key: str = "") -> None:
        """Note what an event tells, unless part of that is not known; those of other keys are kept, too."""
        held = self._found[kind].get((event.host, key))
        if None not in values and (held is None or (event.time, values) > held):
            self._found[kind][event.host, key] = event.time, values

    def each(self, kind: str, clocks: Clocks) -> list[Found]:
        """The newest for each key."""
        newest: dict[str, Found] = {}
        for (host, key), (time, values) in self._found[kind].items():
            found = time - clocks.get(host, 0.0), values
            newest[key] = max(newest.get(key, found), found)
        return list(newest.values())

    def get(self, kind: str, clocks: Clocks) -> Found | None:
        """The newest of all."""
        return max(self.each(kind, clocks), default=None)


class Live:
    """The status of a run, kept up to date by its events."""

    def __init__(self) -> None:
        self._processes: dict[str, Process] = {}
        self._spans: dict[str, tuple[float, float]] = {}
        self._newest = _Newest()
        self._recent: dict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._seconds: dict[str, dict[str, float]] = {"durable": {}, "outage_over": {}}
        self._passed_over = 0
        self._report: Report | None = None

    def take(self, file: str, event: Event | None) -> None:
        """The next line of a file; None if it is not an event."""
        if event is None:
            self._passed_over += 1
            return
        first, last = self._spans.get(event.host, (event.time, event.time))
        self._spans[event.host] = min(first, event.time), max(last, event.time)
        self._note(event)
        if event.kind in self._seconds:
            spent = self._seconds[event.kind]
            spent[file] = spent.get(file, 0.0) + max(event.number("seconds") or 0.0, 0.0)
        if event.kind in _STRUCTURE or (event.kind == "commit" and self._is_early(file)):
            self._processes.setdefault(file, Process()).take(event)
            self._report = None

    def status(self) -> Status | None:
        """Return where the run stands; None before its first event."""
        if not self._spans:
            return None
        report = self._summary()
        clocks, newest = report.clocks, self._newest
        begins = [first - clocks.get(host, 0.0) for host, (first, _) in self._spans.items()]
        agreed, durable = newest.get("sync", clocks), newest.get("durable", clocks)
        agreement = agreed and Agreement(agreed[0], *agreed[1])
        return Status(
            begin=report.begin if report.starts else min(begins),
            last=max(last - clocks.get(host, 0.0) for host, (_, last) in self._spans.items()),
            activity=self._activity(report),
            ending=report.ending,
            starts=report.starts,
            restarts=report.restarts,
            warm=report.warm,
            given_up=report.given_up,
            standbys=self._standbys(clocks),
            agreement=agreement,
            commit=(at := newest.get("commit", clocks)) and Commit(at[0], *at[1]),
            epoch=max((epoch for _, (epoch,) in newest.each("tail", clocks)), default=None),
            commits=self._counts["commits"],
            recent=self._newest_commits(clocks),
            durable=durable and Commit(durable[0] - durable[1][2], *durable[1][:2]),
            durables=self._counts["durables"],
            durable_bytes=self._counts["durable_bytes"],
            durable_seconds=math.fsum(self._seconds["durable"].values()),
            write_failures=self._counts["write_failures"],
            outage=self._outage(clocks),
            outages=self._counts["outages"],
            outage_seconds=math.fsum(self._seconds["outage_over"].values()),
            faults=report.faults,
            steps_repeated=report.steps_repeated,
            hosts=tuple(sorted(self._spans)),
            passed_over=self._passed_over,
        )

    def _note(self, event: Event) -> None:
        """The counts, and the newest event of each kind."""
        place = event.whole("generation"), event.whole("commit")
        match event.kind:
            case "start":
                self._newest.put("start", event)
            case "commit":
                self._newest.put("commit", event, place)
                if event.rank == 0:
                    self._counts["commits"] += 1
                    times = self._recent[event.host]
                    (heapq.heappush if len(times) < RECENT else heapq.heappushpop)(times, event.time)
            case "sync":
                self._newest.put("commit", event, place)
                self._newest.put("sync", event, (*place, event.whole("size")))
            case "durable":
                self._newest.put("durable", event, (*place, event.number("seconds") or 0.0))
                self._counts["durables"] += 1
                self._counts["durable_bytes"] += max(event.whole("bytes") or 0, 0)
            case "outage":
                self._newest.put("outage", event, (event.word("error"),))
                self._counts["outages"] += 1
            case "write_failed" if None not in place:  # else it is a mark that could not be written
                self._newest.put("write_failed", event, (event.word("error"),))
                self._counts["write_failures"] += 1
            case "outage_over":
                self._newest.put("outage_over", event)
            case "standby":
                slot = f"{event.host} {event.whole('slot')}"
                self._newest.put("standby", event, (event.facts.get("ready") is True,), slot)
            case "tail":
                self._newest.put("tail", event, (event.whole("epoch"),), event.word("sampler"))

    def _standbys(self, clocks: Clocks) -> int:
        started = self._newest.get("start", clocks)
        since = started[0] if started else -math.inf
        return sum(ready for time, (ready,) in self._newest.each("standby", clocks) if time >= since)

    def _is_early(self, file: str) -> bool:
        """Return whether the last stint of a file has so few commits that one more may change the summary."""
        stints = self._processes[file].stints if file in self._processes else []
        return bool(stints) and len(stints[-1].numbers) < COMMITS

    def _summary(self) -> Report:
        if self._report is None:
            processes = [process for _, process in sorted(self._processes.items())]
            events = sorted(
                (event for each in processes for event in each.events), key=lambda event: event.time
            )
            stints = tuple(stint for each in processes for stint in each.stints)
            self._report = summarise(Log(tuple(events), stints, self._spans, len(processes), 0))
        return self._report

    def _newest_commits(self, clocks: Clocks) -> tuple[float, ...]:
        times = (time - clocks.get(host, 0.0) for host, told in self._recent.items() for time in told)
        return tuple(sorted(heapq.nlargest(RECENT, times)))

    def _outage(self, clocks: Clocks) -> Outage | None:
        works = [found[0] for kind in ("durable", "outage_over") if (found := self._newest.get(kind, clocks))]
        failures = [
            found
            for kind in ("outage", "write_failed")
            if (found := self._newest.get(kind, clocks)) and found[0] > max(works, default=-math.inf)
        ]
        return Outage(failures[0][0], failures[-1][1][0]) if failures else None

    def _activity(self, report: Report) -> str:
        if report.ending.outcome != "open":
            return report.ending.outcome
        agreed, started = (self._newest.get(kind, report.clocks) for kind in ("sync", "start"))
        if agreed is None or (started is not None and agreed[0] < started[0]):
            return "starting"
        return "recovering" if report.faults and report.faults[-1].recovery is None else "training"
