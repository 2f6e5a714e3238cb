"""The choice of durable commits that may be deleted, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.settings import Best, Keep


@dataclass(frozen=True)
class Facts:
    """The facts about a commit that the choice depends on.

    Attributes:
        commit: which commit.
        time: when it was written, in seconds since the Unix epoch.
        metric: what `Keep.best` goes by; None if the commit has none.
    """

    commit: CommitId
    time: float
    metric: float | None = None


def expired(commits: Iterable[Facts], keep: Keep, now: float) -> list[CommitId]:
    """Return the commits that may be deleted, oldest first; never the newest.

    A job that passes over commits continues from an older one, in a later generation. Until it has made a
    commit of a higher number, those that it passed over may be all that holds this progress: they stay, and
    don't count.

    Args:
        commits: the good commits of a root, in any order: broken ones are neither deleted nor counted.
        keep: what the user wants to keep.
        now: seconds since the Unix epoch.
    """
    ordered = sorted(commits, key=lambda facts: facts.commit)
    good = [facts for facts in ordered if facts.commit.commit <= ordered[-1].commit.commit]
    kept = {facts.commit for facts in good[-keep.last :]}
    if keep.period is not None:
        kept |= _first_of_each_run(good, keep.period)
    if keep.within is not None:
        kept |= {facts.commit for facts in good if now - facts.time < keep.within}
    if keep.best is not None:
        kept |= _best(good, keep.best)
    return [facts.commit for facts in good if facts.commit not in kept]


def metric_of(manifest: Manifest, best: Best | None) -> float | None:
    """The number that `Keep.best` goes by in one commit; None if it has none, or one that is not finite.

    Raises:
        ValueError: the state has no such attribute, or it is not a number.
    """
    if best is None:
        return None
    attributes = manifest.state.get("attributes")
    if not isinstance(attributes, dict) or best.metric not in attributes:
        raise ValueError(f"the state has no attribute '{best.metric}'")
    try:
        value = values.decode(attributes[best.metric])
    except ValueError:  # such as a tensor
        value = attributes[best.metric]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"state.{best.metric} is not a number; make it one with float()")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _first_of_each_run(good: Sequence[Facts], every: int) -> set[CommitId]:
    first: dict[int, CommitId] = {}
    for facts in good:
        first.setdefault(facts.commit.commit // every, facts.commit)
    return set(first.values())


def _best(good: Sequence[Facts], best: Best) -> set[CommitId]:
    # Commits of one value share one measurement, and the first of them is what was measured.
    first: dict[float, CommitId] = {}
    for facts in good:
        if facts.metric is not None and math.isfinite(facts.metric):
            first.setdefault(facts.metric, facts.commit)
    ranked = sorted(first, reverse=best.mode == "max")
    return {first[value] for value in ranked[: best.count]}
