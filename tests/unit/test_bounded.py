from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hvdrecover.machine import Bounded


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_call_that_is_late_fails_those_after_it_until_it_has_ended(gate: threading.Event) -> None:
    bounded = Bounded(0.05)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        bounded(gate.wait)
    with pytest.raises(TimeoutError, match="has still not returned"):
        bounded(int, "1")
    gate.set()
    assert bounded._last is not None and bounded._last.result(60)
    assert bounded(int, "1") == 1


def test_calls_of_several_threads_do_not_count_each_other_as_late(gate: threading.Event) -> None:
    bounded, found = Bounded(60.0), []
    first = threading.Thread(target=lambda: found.append(bounded(gate.wait)))
    first.start()
    second = threading.Thread(target=lambda: found.append(bounded(int, "1")))
    second.start()
    gate.set()
    first.join(60)
    second.join(60)
    assert sorted(found) == [1, True]
