"""The cost of watching over the ranks: a step, and a commit, with and without a guard."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks import workers
from benchmarks.jobs.guarded import RESULT
from benchmarks.rows import Fact, Goal, Row
from benchmarks.states import Setting

_PATIENCE = 1100.0  # seconds
_TITLES = {"digits": "digits example", "digits-tensorflow": "TensorFlow digits example"}
_COMMIT_EVERY, _COMPARE_EVERY = 50, 10  # steps, and commits: the guard's default
_GOAL = Goal(0.01, 0.01, slowdown=True, digits=3)


def measure(setting: Setting) -> list[Row | Fact]:
    """Steps and commits of two real workers over loopback, with and without a guard by turns."""
    framework = "tensorflow" if setting.state == "digits-tensorflow" else "torch"
    workers.run(f"benchmarks.jobs.guarded_{framework}", setting, _PATIENCE)
    found = json.loads((setting.folder / RESULT).read_text())
    title = _TITLES.get(setting.state) or setting.shape.title
    peer = "the same without"
    steps, commits = found["steps"], found["commits"]
    return [
        Row("guard", "a training step with a guard", title, "ms", steps[0], peer, steps[1], _GOAL, True),
        Row("guard", "a commit at which ranks are compared", title, "ms", commits[0], peer, commits[1]),
        Fact(f"a guard at its defaults, {title}, a commit every {_COMMIT_EVERY} steps", _summary(found)),
    ]


def _summary(found: dict[str, Any]) -> str:
    """Return what all of it comes to, in parts of a step's time."""
    differences = [ours - theirs for ours, theirs in zip(*found["steps"], strict=True)]
    step, compared = (statistics.median(found[name][1]) for name in ("steps", "commits"))
    low, middle, high = (each / step for each in statistics.quantiles(differences, n=4))
    parts = [
        f"quartiles of the difference {low:+.1%} / {middle:+.1%} / {high:+.1%} "
        f"in {len(differences)} pairs of steps"
    ]
    with_look, without = map(statistics.median, found["sending"])
    if without:
        parts.append(f"{(with_look - without) / step:+.2%} by the core's clock for looking at gradients")
    a_step = (statistics.median(found["commits"][0]) - compared) / (_COMMIT_EVERY * _COMPARE_EVERY) / step
    return ", ".join([*parts, f"and {a_step:+.2%} for comparing"])
