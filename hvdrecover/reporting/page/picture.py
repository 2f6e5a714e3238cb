"""A time line as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from hvdrecover.reporting import words
from hvdrecover.reporting.page.drawing import draw
from hvdrecover.reporting.page.shapes import LEGEND, Bar, Drawing, Line, Mark
from hvdrecover.reporting.timeline import Timeline

COLOURS = {  # those of the page on a light ground
    "training": "#4f83b6",
    "recovery": "#c97a12",
    "starting": "#8a96a3",
    "down": "#ffffff",
    "fault": "#c0282d",
    "start": "#1b1f24",
    "commit": "#8a96a3",
    "durable": "#1b1f24",
    "grid": "#e3e6ea",
}
_WIDTH = 960  # pixels at a scale of 1
_DPI = 200
_POINTS = 0.72  # points for a pixel, as there are 100 pixels to an inch
_LEGEND = 26  # pixels
_MUTED = "#57616b"
_LINES = {
    "grid": (0.6, "-"),
    "commit": (0.8, "-"),
    "durable": (1.1, "-"),
    "start": (0.8, ":"),
    "fault": (0.8, "-"),
}
_BAR: dict[str, Any] = {"linewidth": 6, "solid_capstyle": "butt"}
_HANDLES: dict[str, dict[str, Any]] = {  # in the legend
    "down": {"linewidth": 0.8, "linestyle": ":"},
    "fault": {"linestyle": "", "marker": "x", "markersize": 5, "markeredgewidth": 1.4},
    "start": {"linestyle": "", "marker": ">", "markersize": 5},
    "commit": {"linestyle": "", "marker": "|", "markersize": 5},
    "durable": {"linestyle": "", "marker": "|", "markersize": 8},
}


def save(timeline: Timeline, path: Path) -> None:
    """Draw a time line, with a legend below it.

    Args:
        timeline: what to draw.
        path: PNG file to write; one that is there is replaced.
    """
    drawing = draw(timeline)
    height = drawing.height + _LEGEND
    figure = Figure(figsize=(_WIDTH / 100, height / 100), dpi=_DPI, facecolor="white")
    plot = _WIDTH - drawing.left - drawing.right - 16
    axes = figure.add_axes((drawing.left / _WIDTH, _LEGEND / height, plot / _WIDTH, drawing.height / height))
    axes.set_xlim(0, 100)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    _shapes(axes, drawing)
    _texts(axes, drawing, 100 / plot)
    _legend(figure, drawing)
    figure.savefig(path, format="png")


def _shapes(axes: Axes, drawing: Drawing) -> None:
    for order, shape in enumerate(drawing.shapes, 1):
        colour = COLOURS[shape.style]
        match shape:
            case Bar():
                bar = Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=colour, zorder=order)
                if shape.style == "down":
                    bar.set(edgecolor=COLOURS["starting"], linestyle=":", linewidth=0.6)
                axes.add_patch(bar)
            case Line():
                width, style = _LINES.get(shape.style, (0.8, "-"))
                axes.plot(
                    *([shape.x, shape.x], [shape.top, shape.bottom]),
                    color=colour,
                    linewidth=width,
                    linestyle=style,
                    zorder=order,
                    clip_on=False,
                )
            case Mark():
                marker, face = ("x", colour) if shape.style == "fault" else (">", colour)
                size = (2 if shape.style == "fault" else 1.4) * shape.size * _POINTS
                for width, around in ((3.2, "white"), (1.4, face)):  # with a margin, so that it stands out
                    axes.plot(
                        *([shape.x], [shape.y]),
                        marker=marker,
                        markersize=size,
                        markeredgewidth=width,
                        color=around,
                        zorder=order,
                        clip_on=False,
                    )


def _texts(axes: Axes, drawing: Drawing, percents: float) -> None:
    """Names and labels.

    Args:
        axes: where to.
        drawing: what holds them.
        percents: of the length of time, for a pixel.
    """
    size = 11 * _POINTS
    for name in drawing.names:
        text = words.printable(name.text)
        axes.text(-9 * percents, name.y, text, size=size, color=_MUTED, ha="right", parse_math=False)
    for label in drawing.labels:
        side, shift, colour = (
            ("left", 4 * percents, COLOURS["fault"]) if label.fault else ("center", 0.0, _MUTED)
        )
        where = label.x + shift, label.y
        axes.text(*where, words.printable(label.text), size=size, color=colour, ha=side, parse_math=False)


def _legend(figure: Figure, drawing: Drawing) -> None:
    handles = [
        Line2D([], [], color=COLOURS[style], label=LEGEND[style], **_HANDLES.get(style, _BAR))
        for style in drawing.styles
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        ncols=max(len(handles), 1),
        frameon=False,
        fontsize=9.5 * _POINTS,
        labelcolor=_MUTED,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
    )
