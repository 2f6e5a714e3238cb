from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdrecover.elastic.scalars.observed import observed
from hvdrecover.errors import ConfigError
from tests.fakes.framework import FakeFramework


def test_a_tensor_is_copied_as_it_may_change() -> None:
    loss = np.array([0.5])
    taken = observed(FakeFramework(), {"loss": loss, "accuracy": None})
    loss[:] = 7
    assert {name: float(value) for name, value in taken.items()} == {"loss": 0.5}


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (np.zeros(3), r"array .*\(3,\)"),
        (np.zeros((0,)), r"array .*\(0,\)"),
        ("0.5", "str"),
        ([0.5], "list"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, fact: str) -> None:
    with pytest.raises(ConfigError, match=rf"^log_metrics\(accuracy=\): an? {fact} "):
        observed(FakeFramework(), {"loss": float("nan"), "accuracy": value})
