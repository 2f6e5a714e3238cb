"""The law by which a figure grows with a number, O(1), O(log n), O(n) or O(n²), fitted to measured values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.rows import Curve

_GROWTHS: Mapping[str, Callable[[float], float]] = {
    "O(1)": lambda n: 0.0,
    "O(log n)": math.log2,
    "O(n)": lambda n: n,
    "O(n²)": lambda n: n * n,
}
_EXACT = 0.1  # of the figure: what is this near is near enough
_MARGIN = 1.3  # by which a simpler law may be worse than the best


@dataclass(frozen=True)
class Law:
    """A constant and a part that grows."""

    name: str  # `O(n)`, say
    constant: float  # the figure's part that does not grow
    factor: float  # of what grows
    error: float  # the typical distance from what was measured, relative to it

    def at(self, number: float) -> float:
        """The figure at a number."""
        return self.constant + self.growing(number)

    def growing(self, number: float) -> float:
        """The part of it that has grown."""
        return self.factor * _GROWTHS[self.name](number)


def of(curve: Curve) -> Law:
    """Return the law of a curve; bytes are copied, sent and written one after another, so O(n) at most."""
    return fit(curve.points, ("O(1)", "O(n)") if curve.along == "GB" else tuple(_GROWTHS))


def fit(points: Mapping[float, Sequence[float]], names: Sequence[str] = tuple(_GROWTHS)) -> Law:
    """Return the simplest law that is about as near to the medians as the best."""
    medians = {number: statistics.median(values) for number, values in points.items()}
    laws = [_fitted(name, medians) for name in names]
    best = min(law.error for law in laws)
    return next(law for law in laws if law.error <= max(_EXACT, _MARGIN * best))


def _fitted(name: str, medians: Mapping[float, float]) -> Law:
    """Fit one law by least squares of relative errors; neither part is below zero."""
    figures = np.array(list(medians.values()))
    columns = np.array([[1.0, _GROWTHS[name](number)] for number in medians]) / figures[:, None]
    tries = []
    for used in ([0, 1], [0], [1]):
        parts = np.zeros(2)
        parts[used] = np.linalg.lstsq(columns[:, used], np.ones(len(figures)), rcond=None)[0]
        error = float(np.sqrt(np.mean((columns @ parts - 1) ** 2)))
        if (parts >= 0).all():
            tries.append(Law(name, float(parts[0]), float(parts[1]), error))
    return min(tries, key=lambda law: law.error)
