from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdrecover.cli import main
from hvdrecover.drill import lab

SCRIPT = ["--", "python", "train.py"]


def complaint(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert main(["drill", "-np", "2", "--output", str(folder / "drill"), *words, *SCRIPT]) == 1
    assert not (folder / "drill").exists() or not any((folder / "drill").iterdir())
    return capsys.readouterr().err


def test_a_lab_without_a_spare_host_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    error = complaint(capsys, tmp_path, "--lab", "2")
    assert "-np 2:" in error and "--lab 3" in error


@pytest.mark.parametrize("option", ["-H", "--hosts", "--discover", "-i", "--network-interface", "--max-np"])
def test_what_a_lab_decides_can_not_be_told(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert f" {option}\n" in complaint(capsys, tmp_path, "--lab", "3", option, "2")


def test_a_program_that_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setitem(lab.PACKAGES, "no-such-program", "its-package")
    assert "apt-get install its-package" in complaint(capsys, tmp_path, "--lab", "3")


def test_only_root_can_make_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--lab: only root" in complaint(capsys, tmp_path, "--lab", "3")


def test_faults_of_hosts_alone_need_a_lab(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--lab 3" in complaint(capsys, tmp_path, "--faults", "host-cut-off")
