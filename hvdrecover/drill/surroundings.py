"""The time, the machine and the versions of a drill: without these, its numbers say little."""

from __future__ import annotations

from hvdrecover.drill.outcome import Outcome
from hvdrecover.reporting import words


def facts(outcome: Outcome) -> dict[str, str]:
    """Return what there is to say of a drill as a whole, by name."""
    reports = [result.report for result in outcome.results]
    numbers = outcome.numbers
    goodput = (
        "" if numbers.goodput is None else f"{numbers.goodput:.1%} of the time in committed steps, at least"
    )
    begins = [report.begin for report in reports]
    found = {
        "date": words.moment(min(begins)).strftime("%Y-%m-%d %H:%M %Z") if begins else "",
        **(words.surroundings(reports[0]) if reports else {}),
        "repeated": f"{numbers.steps_lost or 0:g} steps",
        "goodput": goodput,
    }
    return {name: text for name, text in found.items() if text}
