"""What ``hvdrecover drill --lab`` refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdrecover.cli import main
from hvdrecover.drill import lab


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lab", "2"], "write --lab 3"),
        (["--lab", "3"], "--lab: only root"),
        (["--faults", "host-cut-off"], "--lab 3"),
    ],
)
def test_a_lab_that_cannot_be_is_refused(
    words: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    output = ["--output", str(tmp_path / "drill")]
    assert main(["drill", "-np", "2", *output, *words, "--", "python", "train.py"]) == 1
    assert not (tmp_path / "drill").exists() or not any((tmp_path / "drill").iterdir())
    assert problem in capsys.readouterr().err


def test_a_program_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(lab.PACKAGES, "no-such-program", "its-package")
    assert "apt-get install its-package" in lab.lacks()
