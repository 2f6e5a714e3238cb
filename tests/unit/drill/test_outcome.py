"""The verdict of a drill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rank_local import RankLocal
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.outcome import Outcome, Result

OWN = RankLocal(frozenset({"model.mean"}), Finding(rules.RANK_LOCAL, "rank 0 resumes from another rank's"))
MORE = RankLocal(frozenset({"model.mean", "losses"}), Finding(rules.RANK_LOCAL, "and a list"))
BROKEN = Finding(rules.WEIGHTS, "commit 3 is not that")
NOTHING: Any = None  # what a verdict does not look at


def result(rank_local: RankLocal = RankLocal(), *findings: Finding) -> Result:  # noqa: B008  frozen
    return Result(NOTHING, NOTHING, NOTHING, [NOTHING], findings=list(findings), rank_local=rank_local)


@pytest.mark.parametrize(
    ("results", "verdict", "recovers"),
    [
        ([result()], "recovers", True),
        ([result(OWN)], "recovers, but for rank-local state", True),
        ([result(OWN, BROKEN)], "does not recover", False),
        ([result(OWN), result(RankLocal(), BROKEN)], "does not recover", False),
        ([], "does not recover", False),
    ],
)
def test_rank_local_state_is_no_failure_and_hides_none(
    results: list[Result], verdict: str, recovers: bool
) -> None:
    outcome = Outcome(NOTHING, NOTHING, None, results, {}, Path())
    assert (outcome.verdict, outcome.recovers) == (verdict, recovers)


def test_the_run_with_most_of_it_is_told() -> None:
    outcome = Outcome(NOTHING, NOTHING, None, [result(), result(OWN), result(MORE)], {}, Path())
    assert outcome.rank_local == MORE.finding
