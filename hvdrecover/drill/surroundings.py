"""When and where a drill ran, and on what: without it, its numbers say little."""

from __future__ import annotations

import os
import platform

from hvdrecover.drill.outcome import Outcome
from hvdrecover.install.environment import version_of
from hvdrecover.reporting import words
from hvdrecover.version import __version__

_PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod")


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
        "versions": ", ".join(_versions()),
        "repeated": f"{numbers.steps_lost or 0:g} steps",
        "goodput": goodput,
    }
    return {name: text for name, text in found.items() if text}


def _versions() -> list[str]:
    found = ((name, version_of(name)) for name in _PACKAGES)
    installed = [f"{name} {version}" for name, version in found if version]
    return [f"Python {platform.python_version()}", f"hvdrecover {__version__}", *installed]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
