"""The README's way to install gives a working package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.acceptance


def test_pip_install_of_the_repository_gives_a_working_package(tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--target",
        os.fspath(target),
        os.fspath(ROOT),
    ]
    subprocess.run(pip, check=True, cwd=tmp_path)
    environ = {**os.environ, "PYTHONPATH": os.fspath(target)}
    shown = subprocess.run(
        [sys.executable, "-m", "hvdrecover", "--version"],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(r"hvdrecover \d+\.\d+\.\d+\n", shown.stdout), shown.stderr
    assert (target / "hvdrecover" / "py.typed").exists()
    assert (target / "hvdrecover" / "examples" / "torch_digits.py").exists()
