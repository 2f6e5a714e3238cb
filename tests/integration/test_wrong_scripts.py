"""A script that is wrong says so once, and last, whatever it fails of before it has trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.examples.digits_run import PATIENCE, supervised
from hvdrecover.launch.job import Job
from tests.integration.conftest import LONG

TENSORFLOW = 'import tensorflow\nimport hvdrecover.tensorflow\nopen("/not/there")\n'
ALL = "2 of 2 ranks ended like this:"


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        pytest.param("def f(:", "SyntaxError: invalid syntax", marks=LONG),
        pytest.param(None, " script in {}", marks=LONG),
        pytest.param(TENSORFLOW, "No such file or directory: '/not/there'", marks=LONG),
    ],
)
def test_a_wrong_script_on_two_ranks_is_told_once_and_last(
    script: str | None, last: str, jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if script is not None:
        (tmp_path / "train.py").write_text(script)
    jobs.append(Job([*supervised(), "python", "train.py"], tmp_path / "log"))
    assert jobs[0].wait(PATIENCE) == 1
    log = (tmp_path / "log").read_text()
    last = last.format(tmp_path)
    assert log.rstrip().endswith(last)
    assert log.count(last) == 1
    assert log.count("Traceback (most recent call last)") == (script in ("import not_there", TENSORFLOW))
    assert log.count(f"an exception before the job's first commit; {ALL}") == 1
    assert "exit with status code" not in log  # Horovod's line
    assert script == TENSORFLOW or "<stderr>:" not in log  # which says what processor it has found
    assert jobs[0].processes() == []
