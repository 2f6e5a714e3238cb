"""Rows of the benchmarks' table: which of them a run must not miss."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.rows import MEMORY, Goal, Row, broken

KEPT = Row("near", "kept", "1.0 GB", MEMORY, [3.04], goal=Goal(3.0, 3.0, digits=1))
BROKEN = Row("near", "broken", "1.0 GB", MEMORY, [3.0, 3.06, 3.1], goal=Goal(3.0, 3.0, digits=1))
UNBOUND = Row("near", "unbound", "1.0 GB", MEMORY, [9.0])
SLOW = Row("near", "slow", "1.0 GB", "ms", [9.0], goal=Goal(2.0, 1.3))


def test_only_memory_beyond_its_bar_breaks_a_promise() -> None:
    assert broken([KEPT, BROKEN, UNBOUND, SLOW]) == [BROKEN]


@pytest.mark.parametrize(
    ("rows", "size", "code"),
    [([KEPT, UNBOUND, SLOW], "full", 0), ([KEPT, BROKEN], "full", 1), ([KEPT, BROKEN], "small", 0)],
)
def test_a_run_fails_by_it_after_the_table_is_written(
    rows: list[Row],
    size: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(benchmarks, "_measure", lambda *arguments: rows)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    assert benchmarks.main(["--size", size, "--only", "near", "--folder", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert all(row.what in printed for row in rows)
    assert ("more than promised: broken: 3.1 states" in printed) == bool(code)
