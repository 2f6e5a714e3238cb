"""Laws fitted to figures, and tables made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import curves, laws
from benchmarks.rows import Curve, Fact, dump, load

NUMBERS = (2.0, 16.0, 128.0, 1024.0)
START, END = "<!-- benchmarks/run writes from here -->", "<!-- to here -->"


def points(figure: Callable[[float], float]) -> dict[float, list[float]]:
    return {number: [0.9 * figure(number), figure(number), 1.5 * figure(number)] for number in NUMBERS}


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("O(1)", lambda n: 3.0),
        ("O(log n)", lambda n: 1.0 + math.log2(n)),
        ("O(n)", lambda n: 5.0 + 0.1 * n),
        ("O(n²)", lambda n: 5.0 + 0.1 * n * n),
    ],
)
def test_a_law_is_recognised_from_medians(name: str, figure: Callable[[float], float]) -> None:
    law = laws.fit(points(figure))
    assert law.name == name
    assert law.error < 1e-6
    assert law.at(500.0) == pytest.approx(figure(500.0))


def test_what_hardly_differs_is_constant() -> None:
    assert laws.fit({2.0: [1.0], 4.0: [1.1], 8.0: [0.9], 16.0: [1.05]}).name == "O(1)"


def test_a_part_of_a_law_is_never_negative() -> None:
    law = laws.fit({1.0: [1.0], 10.0: [0.7], 100.0: [0.4]})
    assert (law.name, law.factor) == ("O(1)", 0.0)


def test_curves_survive_their_file(tmp_path: Path) -> None:
    found = [Curve("ranks", "a commit", "ms", "ranks", "simulated", points(lambda n: n)), Fact("a", "b")]
    dump(found, tmp_path / "found.json")
    assert load(tmp_path / "found.json") == found


def test_the_page_keeps_measured_and_simulated_apart_and_tells_what_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    found = [
        Curve("ranks", "a commit", "ms", "ranks", "simulated", points(lambda n: 0.1 + n / 100)),
        Curve("sizes", "a commit", "s", "GB", "measured", {0.1: [0.02], 1.0: [0.2], 4.0: [0.8]}),
    ]
    curves.write(found, [Fact("not measured: 8 GB", "no room")], page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.index("## Measured") < text.index("| a commit, s | 0.02 | 0.2 | 0.8 | O(n)")
    assert text.index("## Simulated") < text.index("| a commit, ms | 0.12 |")
    assert "10.1 ms, 99% of it grows" in text
    assert "## Computed" not in text  # without all that it needs
    assert "- not measured: 8 GB: no room" in text
