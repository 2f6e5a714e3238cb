"""Pictures: of the table, how far each row is from its bar and its stretch; and of what grows, its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks import laws
from benchmarks.report import amount
from benchmarks.rows import Curve, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLOURS = {"stretch met": "#2a9d5c", "bar met": "#e0a526", "missed": "#c8443c"}
_WIDEST = 2.0


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows that have a goal: the bar is at 1, and shorter is better.

    Args:
        rows: what was measured.
        path: PNG file to write.
    """
    rows = [row for row in rows if row.goal is not None]
    figure, axes = plt.subplots(figsize=(10, 0.8 + 0.36 * len(rows)), dpi=110)
    for place, row in enumerate(reversed(rows)):
        _bar(axes, place, row)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [_label(row) for row in reversed(rows)], fontsize=8)
    axes.set_xlim(0, _WIDEST)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel("relative to the bar (1); ◆ the stretch; shorter is better", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def grow(curves: Sequence[Curve], path: Path) -> None:
    """Draw curves of one chart, each with its law: values as dots, the law as a line.

    Args:
        curves: along the same number.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    for curve in curves:
        law = laws.fit(curve.points)
        numbers = np.geomspace(min(curve.points), max(curve.points), 50)
        label = f"{curve.what}, {curve.unit}: {law.name}"
        (line,) = axes.plot(numbers, [law.at(float(each)) for each in numbers], linewidth=1, label=label)
        for number, values in curve.points.items():
            axes.plot([number] * len(values), values, "o", markersize=3, color=line.get_color(), alpha=0.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"{curves[0].along}; {curves[0].kind}", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _bar(axes: plt.Axes, place: int, row: Row) -> None:
    assert row.goal is not None
    length = max(0.0, _relative(row, row.value))
    axes.barh(place, min(length, _WIDEST), height=0.62, color=_COLOURS[row.verdict])
    axes.plot(_relative(row, row.goal.stretch), place, marker="D", color="black", markersize=4)
    text = amount(row, row.value)
    inside = length > 0.75 * _WIDEST
    where, side = (min(length, _WIDEST) - 0.02, "right") if inside else (max(length, 0.0) + 0.03, "left")
    axes.text(where, place, text, va="center", ha=side, fontsize=8, color="white" if inside else "black")


def _relative(row: Row, value: float) -> float:
    assert row.goal is not None
    return row.goal.bar / value if row.goal.at_least else value / row.goal.bar


def _label(row: Row) -> str:
    against = f" vs {row.peer}" if row.peer else ""
    return f"{row.what}{against}\n{row.state}"
