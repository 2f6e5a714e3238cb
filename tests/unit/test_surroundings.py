"""The machine, and what is installed there."""

from __future__ import annotations

import platform
from pathlib import Path

from hvdrecover import surroundings
from hvdrecover.version import __version__


def test_the_versions_are_those_that_are_installed() -> None:
    found = surroundings.versions()
    assert (found["python"], found["hvdrecover"]) == (platform.python_version(), __version__)
    assert found["torch"] == surroundings.version_of("torch")


def test_a_half_removed_distribution_is_none(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    assert surroundings.version_of("torch", [str(tmp_path)]) is None


def test_the_machine_is_its_system_and_its_processors() -> None:
    assert surroundings.machine().startswith(f"{platform.system()} ")
    assert surroundings.machine().endswith(" processors")
