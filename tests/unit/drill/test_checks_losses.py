from __future__ import annotations

import math

import pytest

from hvdrecover.drill.checks import losses, rules
from hvdrecover.drill.testimony import Testimony
from tests.unit.drill.lines import Story

COMMITS = 20


def run(last: float, size: int = 2, noise: float = 0.0) -> Testimony:
    """A run whose losses fall; in its second half it may have another number of ranks."""
    story = Story().rendezvous(1, 0)
    for number in range(1, COMMITS + 1):
        if number == COMMITS // 2 + 1:
            story.rendezvous(2, number - 1, size=size)
        falling = last + max(0, 16 - number)
        story.step().commit(loss=falling + noise * (-1) ** number)
    return story.told


@pytest.mark.parametrize(
    ("last", "size", "noise", "broken"),
    [
        (1.09, 1, 0.0, False),
        (0.91, 1, 0.0, False),
        (1.11, 1, 0.0, True),
        (0.5, 1, 0.0, False),
        (1.3, 1, 0.5, False),
        (9.0, 1, 0.5, True),
        (math.nan, 1, 0.0, True),
        (math.inf, 1, 0.0, True),
        (9.0, 2, 0.0, False),  # weights were compared
    ],
)
def test_the_last_losses_of_fewer_ranks_are_no_worse(
    last: float, size: int, noise: float, broken: bool
) -> None:
    findings = losses.compare(run(1.0, noise=noise), run(last, size, noise))
    assert [finding.rule for finding in findings] == [rules.LOSS] * broken
    if broken and math.isfinite(last):
        assert "1 of 2 ranks" in findings[0].message and f"{last:.4g}" in findings[0].message


@pytest.mark.parametrize("spread", [0.0, 5.0, 50.0])
def test_losses_that_scatter_widely_excuse_no_worse_mean(spread: float) -> None:
    findings = losses.compare(run(1.0, noise=0.1), run(50.0, 1, noise=spread))
    assert [finding.rule for finding in findings] == [rules.LOSS]


def test_what_can_not_be_compared_is_told_with_its_remedy() -> None:
    told, silent = (
        run(1.0, 1),
        Story().rendezvous(1, 0).step().commit().rendezvous(2, 1, size=1).step().commit().told,
    )
    assert losses.unproven(run(1.0), told, ended=True) == ""
    assert losses.unproven(run(1.0), run(2.0), ended=False) == ""
    assert "--duration" in losses.unproven(run(1.0), told, ended=False)
    assert "1 of 2 ranks" in losses.unproven(run(1.0), silent, ended=True)
    assert "state.log_metrics" in losses.unproven(run(1.0), silent, ended=True)
    assert losses.compare(run(1.0), silent) == []
