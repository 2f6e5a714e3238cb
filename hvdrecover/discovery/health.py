"""The health of a host, from the checks that it has passed and failed; pure functions.

One failed check may be chance, and to leave a host out costs the job a resize, as does taking it back.
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 2  # checks in a row after which a host that was well is left out
RECOVERED = 3  # good checks in a row after which one that was left out comes back
EVERY = 5.0  # seconds between two checks of a host that is healthy; one that isn't is checked at each look


@dataclass(frozen=True)
class Health:
    """The facts known about a host's health.

    Attributes:
        healthy: whether it may be used.
        since: when that changed last, in seconds since the epoch.
        checked: when it was checked last, as well.
        streak: how many checks in a row have spoken against what it is.
        why: what the last failed check has said.
    """

    healthy: bool
    since: float
    checked: float
    streak: int = 0
    why: str = ""


def judged(before: Health | None, problem: str, now: float) -> Health:
    """Return what a check makes of a host.

    Args:
        before: what was known; None at the first check.
        problem: what the check has found; an empty string if the host is healthy.
        now: when it was made.
    """
    good = not problem
    if before is None:
        return Health(good, now, now, why=problem)
    why = problem or before.why
    if good == before.healthy:
        return Health(before.healthy, before.since, now, why=why)
    streak = before.streak + 1
    if streak < (RECOVERED if good else FAILURES):
        return Health(before.healthy, before.since, now, streak, why)
    return Health(good, now, now, why=why)


def is_due(health: Health | None, now: float) -> bool:
    """Return whether a host is to be checked."""
    if health is None or not health.healthy or health.streak:
        return True
    return not 0 <= now - health.checked < EVERY
