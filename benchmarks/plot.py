"""Pictures: of the rows that matter most, our seconds beside theirs; and of what grows, its curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np

from benchmarks import laws
from benchmarks.rows import Curve, Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_SECONDS = {"s": 1.0, "ms": 1e-3}
_OURS, _THEIRS, _MUTED = "#2f6fb0", "#b9c1c9", "#57616b"
_ROOM = 1.14  # of the longest bar, for the number behind it


class _Panel(NamedTuple):
    """A comparison: its title, `Row.topic`, and how `Row.what` and each `Row.peer` to show begin."""

    title: str
    topic: str
    what: str
    peers: Sequence[str] = ("",)


_PANELS = (
    _Panel("SIGKILL of one worker, until all step again", "peers", "SIGKILL of one worker"),
    _Panel("SIGKILL of all workers, until all step again", "peers", "SIGKILL of all"),
    _Panel(
        "How long a commit stalls training",
        "stall",
        "stall of a commit that is due",
        ("Horovod's TorchState.save()", "DCP async_save"),
    ),
    _Panel(
        "Until a commit is durable",
        "durable",
        "time until durable",
        ("torch.save", "safetensors", "DCP save"),
    ),
    _Panel("Until a commit is restored from disk", "restore", "restore, nothing cached"),
)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the few rows that matter most, as far as they were measured."""
    panels = [(panel, chosen) for panel in _PANELS if (chosen := _chosen(panel, rows))]
    bars = [1 + len(chosen) for _, chosen in panels] or [1]
    figure, all_axes = plt.subplots(
        len(bars),
        figsize=(9, 1.0 + sum(0.55 + 0.27 * count for count in bars)),
        dpi=120,
        height_ratios=bars,
        squeeze=False,
        layout="constrained",
    )
    for axes in all_axes.flat:
        axes.axis("off")
    for axes, (panel, chosen) in zip(all_axes.flat, panels, strict=False):
        _fill(axes, panel.title, chosen)
    figure.suptitle("What recovery and commits take, in seconds (medians); shorter is better", fontsize=12)
    figure.savefig(path)
    plt.close(figure)


def grow(curves: Sequence[Curve], path: Path) -> None:
    """Draw curves of one chart, each with its law: values as dots, the law as a line."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    for curve in curves:
        law = laws.of(curve)
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


def _chosen(panel: _Panel, rows: Sequence[Row]) -> list[Row]:
    """The rows of a panel; all are of the first state that was measured, which is the largest."""
    found = [row for row in rows if row.topic == panel.topic and row.what.startswith(panel.what)]
    found = [row for row in found if row.theirs and row.unit in _SECONDS and row.state == found[0].state]
    return [row for peer in panel.peers for row in found if row.peer.startswith(peer)]


def _fill(axes: plt.Axes, title: str, rows: Sequence[Row]) -> None:
    """One bar is ours, and below it there is one for each peer."""
    seconds = [statistics.median(values) * _SECONDS[rows[0].unit] for values in _values(rows)]
    names = ["hvdrecover", *(row.peer for row in rows)]
    axes.axis("on")
    axes.barh(range(len(names)), seconds, height=0.7, color=[_OURS, *[_THEIRS] * len(rows)])
    for place, value in enumerate(seconds):
        style = {"va": "center", "fontsize": 8, "weight": "normal" if place else "bold"}
        axes.text(value + max(seconds) * 0.01, place, f"{value:.2g} s", **style)
    axes.set_title(f"{title}  ({rows[0].state})", loc="left", fontsize=9, weight="bold")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0, max(seconds) * _ROOM)
    axes.invert_yaxis()
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelcolor=_MUTED)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(_THEIRS)


def _values(rows: Sequence[Row]) -> list[Sequence[float]]:
    return [rows[0].ours, *(row.theirs for row in rows)]
