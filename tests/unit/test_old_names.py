"""Names of an earlier day: they work in this version, and say what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdrecover.checkpoint.settings import Checkpoint, Keep
from hvdrecover.elastic.guard.settings import Guard


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (lambda: Keep(newest=2), Keep(last=2), r"Keep\(newest=…\) is called Keep\(last=…\) now"),
        (lambda: Keep(every=10), Keep(period=10), r"Keep\(every=…\) is called Keep\(period=…\)"),
        (
            lambda: Keep(younger_than=7.5),
            Keep(within=7.5),
            r"Keep\(younger_than=…\) is called Keep\(within=…\)",
        ),
        (
            lambda: Checkpoint("/data", every="auto"),
            Checkpoint("/data", interval="auto"),
            r"Checkpoint\(every=…\)",
        ),
        (lambda: Guard(data_changed="error"), Guard(), r"Guard\(data_changed='error'\) is called"),  # type: ignore[arg-type]
    ],
)
def test_settings(old: Callable[[], Any], new: object, said: str) -> None:
    with pytest.warns(DeprecationWarning, match=said) as warned:
        assert old() == new
    assert [each.filename for each in warned] == [__file__]  # the line that is to be changed
