"""When and where a drill ran, and on what: without it, its numbers say little."""

from __future__ import annotations

import os
import platform

from hvdrecover.doctor.facts import versions
from hvdrecover.drill.outcome import Outcome
from hvdrecover.reporting import words


def facts(outcome: Outcome) -> dict[str, str]:
    """Return what there is to say of a drill as a whole, by name; of the machine that this is called on."""
    begins = [result.report.begin for result in outcome.results]
    numbers = outcome.numbers
    goodput = (
        "" if numbers.goodput is None else f"{numbers.goodput:.1%} of the time in committed steps, at least"
    )
    found = {
        "date": words.moment(min(begins)).strftime("%Y-%m-%d %H:%M %Z") if begins else "",
        "machine": f"{platform.node()}, {platform.system()} {platform.machine()}, {_cores()} processors",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items() if version),
        "repeated": f"{numbers.steps_lost or 0:g} steps",
        "goodput": goodput,
    }
    return {name: text for name, text in found.items() if text}


def _cores() -> int:
    return len(os.sched_getaffinity(0))
