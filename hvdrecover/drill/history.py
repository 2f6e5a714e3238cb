"""The events of a run of a drill, whose clock the drill itself may have set."""

from __future__ import annotations

from dataclasses import replace

from hvdrecover.drill.faults.clock import ClockJump
from hvdrecover.drill.runs import Run
from hvdrecover.reporting import reading
from hvdrecover.reporting.clocks import retimed
from hvdrecover.reporting.records import Log

_MARGIN = 60.0  # seconds; a jump is much longer


def read(run: Run) -> Log:
    """A run's events, with the times right that were told while its clock was ahead.

    Raises:
        ConfigError: it has written none.
    """
    return settled(reading.read(run.folder / "events"), run.ended, ClockJump.seconds)


def settled(log: Log, ended: float, jump: float) -> Log:
    """The same events, with those set back that come from after a run's end.

    Args:
        log: the events.
        ended: when the run ended, by a clock that is right, in seconds since the Unix epoch.
        jump: by how many seconds the run's clock was ahead at times.
    """

    def right(host: str, time: float) -> float:
        return time - jump if time > ended + _MARGIN else time

    # The last event may be one of those, and the one that was last in truth is not known here.
    spans = {host: (right(host, first), min(last, ended)) for host, (first, last) in log.spans.items()}
    return replace(retimed(log, right), spans=spans)
