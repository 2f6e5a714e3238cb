"""Tables of how figures grow, for the terminal and for the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import laws, report
from benchmarks.projection import projected
from benchmarks.rows import Curve, Fact

_AT = 1000.0  # ranks, guardians or hosts at which laws are looked at
_COUNTED = ("ranks", "guardians", "hosts")  # not processes, which share this machine's cores
_TITLES = {
    "jobs": "Real jobs",
    "commits": "Commits of real jobs",
    "ranks": "Simulated ranks",
    "manifest": "The manifest with the random streams of simulated ranks",
    "guardians": "Stub guardians",
    "hosts": "Host discovery",
    "sizes": "Bytes of a state of 160 tensors",
    "sizes-memory": "The same: memory, in states",
    "tensors": "Tensors of a state of 0.1 GB",
    "tensors-memory": "The same: memory, in states",
}


def show(curves: Sequence[Curve], console: Console) -> None:
    """Print each figure with its law."""
    table = Table("what", "medians", "law", "at 1,000", caption="figures that grow with a number")
    for curve in curves:
        law = laws.of(curve)
        table.add_row(curve.what, _medians(curve), _formula(law), _at_thousand(curve, law))
    console.print(table)


def write(curves: Sequence[Curve], facts: Sequence[Fact], page: Path) -> None:
    """Put tables and pictures into a page, between its two markers.

    Args:
        curves: what was measured.
        facts: what else is to be known, such as what was not measured.
        page: see `benchmarks.report.fill`; the pictures lie in ``images`` beside it.
    """
    measured = [curve for curve in curves if curve.kind == "measured"]
    simulated = [curve for curve in curves if curve.kind == "simulated"]
    lines = [
        f"Written by `benchmarks/run --only scale` on {date.today():%-d %B %Y}.",
        *_section("Measured", measured),
        *_section("Simulated", simulated),
        *projected(curves),
        *(["\n## Limits of memory\n"] if facts else []),
        *report.listed(facts),
    ]
    report.fill(page, lines)


def picture(chart: str) -> str:
    """Return the path of a chart's picture, from the page."""
    return f"images/scale-{chart}.png"


def charts(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return curves by the chart that they are drawn in."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.chart, []).append(curve)
    return found


def _section(title: str, curves: Sequence[Curve]) -> list[str]:
    lines = [f"\n## {title}"]
    for chart, drawn in charts(curves).items():
        along = [f"{number:,.3g}" if number < 1000 else f"{number:,.0f}" for number in _numbers(drawn)]
        counted = drawn[0].along
        last = f"at 1,000 {counted}" if counted in _COUNTED else "grows"
        table = [[f"by {counted}", *along, "law", last]]
        for curve in drawn:
            law = laws.of(curve)
            medians = [_median(curve, number) for number in _numbers(drawn)]
            end = _at_thousand(curve, law)
            table.append([f"{curve.what}, {curve.unit}", *medians, _formula(law), end])
        shown = f"\n![{_TITLES[chart]}]({picture(chart)})"
        lines += [f"\n### {_TITLES[chart]}\n", *report.markdown(table), shown]
    return lines


def _numbers(curves: Sequence[Curve]) -> list[float]:
    return sorted({number for curve in curves for number in curve.points})


def _medians(curve: Curve) -> str:
    return ", ".join(f"{number:g}: {_median(curve, number)}" for number in sorted(curve.points))


def _median(curve: Curve, number: float) -> str:
    return f"{statistics.median(curve.points[number]):.3g}" if number in curve.points else "-"


def _formula(law: laws.Law) -> str:
    """``0.12 + 0.0001 n: O(n)``."""
    parts = [f"{law.constant:.2g}"] if law.constant or not law.factor else []
    terms = {"O(log n)": "log₂ n", "O(n)": "n", "O(n²)": "n²"}
    if law.factor:
        parts.append(f"{law.factor:.2g} {terms[law.name]}")
    return f"{law.name}: {' + '.join(parts)} (±{law.error:.0%})"


def _at_thousand(curve: Curve, law: laws.Law) -> str:
    """The figure at 1,000, and the part of it that grows; of all else, the part of the last that did."""
    number = _AT if curve.along in _COUNTED else max(curve.points)
    share = law.growing(number) / law.at(number) if law.at(number) else 0.0
    grown = f"{share:.0%} of it grows" if share else "nothing of it grows"
    return f"{law.at(number):.3g} {curve.unit}, {grown}" if curve.along in _COUNTED else grown
