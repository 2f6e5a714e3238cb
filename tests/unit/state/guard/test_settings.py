from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.guard.settings import Guard


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters_every_commits", 0),
        ("parameters_every_commits", 1.5),
        ("parameters_every_commits", True),
        ("on_divergence", "ignore"),
        ("on_divergence", None),
        ("numerics", "heal"),
        ("numerics_budget", -1),
        ("numerics_budget", None),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*{value!r}"):
        Guard(**{name: value})


def test_nothing_has_to_be_watched() -> None:
    guard = Guard(parameters_every_commits=None, numerics=None)
    assert (guard.parameters_every_commits, guard.numerics) == (None, None)
