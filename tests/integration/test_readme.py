"""The README's way to install gives a working package, and the documentation a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.acceptance
def test_pip_install_of_the_repository_gives_a_working_package(tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps"]
    pip += ["--target", os.fspath(target), os.fspath(ROOT)]
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


def test_the_site_is_built(tmp_path: Path) -> None:
    """There is no warning of links, anchors, docstrings or their arguments."""
    command = [ROOT / "scripts" / "docs", "--site-dir", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "hvdrecover run" in (tmp_path / "index.html").read_text()  # of the README
    linked = tmp_path / "files/examples/slurm/train.sbatch.html"
    assert "#SBATCH" in linked.read_text()
    api = (tmp_path / "api" / "torch.html").read_text()
    assert 'id="hvdrecover.torch.TorchState.commit"' in api
    assert "::</p>" not in api
    assert '<a href="#hvdrecover.torch.Checkpoint"><code>Checkpoint</code></a>' in api
