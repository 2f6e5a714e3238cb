from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdrecover.elastic.scalars.observed import Observed
from hvdrecover.errors import ConfigError
from tests.fakes.framework import FakeFramework


@pytest.fixture
def observed() -> Observed:
    return Observed(FakeFramework())


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), np.array([np.nan], np.float32)])
def test_a_loss_that_is_not_finite_is_remembered_until_somebody_asks(observed: Observed, bad: Any) -> None:
    for loss in (3e38, 3e38, 1):
        observed.take({"loss": loss, "accuracy": 1})
    observed.take({"accuracy": float("nan")})
    assert observed.take_not_finite() == []
    observed.take({"loss": bad})
    observed.take({"loss": 0.5})
    assert observed.take_not_finite() == ["loss"]
    assert observed.take_not_finite() == []


def test_a_tensor_is_copied_as_it_may_change(observed: Observed) -> None:
    loss = np.array([0.5])
    taken = observed.take({"loss": loss})
    loss[:] = 7
    assert float(taken["loss"]) == 0.5


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros(3), r"an array of shape \(3,\) is no number"),
        (np.zeros((0,)), r"an array of shape \(0,\) is no number"),
        ("0.5", "a str is no number"),
        ([0.5], "a list is no number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(observed: Observed, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"observe\(accuracy=\): {reason}"):
        observed.take({"loss": float("nan"), "accuracy": value})
    assert observed.take_not_finite() == []
