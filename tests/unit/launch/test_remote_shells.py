from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.launch import ssh

ENTRY_POINTS = """\
[hvdrecover.remote_shells]
racks = rack_shell
function = rack_shell:main
missing = rack_shells
submodule = no_package.shell
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package that has remote shells."""
    info = tmp_path / "rack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "rack_shell.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_installed_remote_shell_runs_as_a_module(site: Path) -> None:
    command = ssh.remote_shell("racks 'a file'", os.defpath)
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [*command, "-o", "X=1", "n1", "true"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (7, "['a file', '-o', 'X=1', 'n1', 'true']\n")
    assert "rack_shell" not in sys.modules


def test_an_installed_remote_shell_goes_before_a_program_of_that_name(site: Path) -> None:
    (site / "racks").write_text("#!/bin/sh\n")
    (site / "racks").chmod(0o755)
    assert ssh.remote_shell("racks", str(site)) == [sys.executable, "-m", "rack_shell"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("raks file", "'raks' is .*installed: .*racks"),
        ("missing", "'missing = rack_shells' of package rack .*does not exist"),
        ("submodule", "'submodule = no_package.shell' of package rack .*: No module named 'no_package'"),
        ("function", "'function = rack_shell:main' of package rack .*without ':main'"),
        ("racks 'file", "split 'racks 'file'"),
        (" ", "blank"),
    ],
)
def test_an_unknown_or_broken_remote_shell_is_an_error(site: Path, setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^HVDRECOVER_REMOTE_SHELL: .*{problem}"):
        ssh.remote_shell(setting, os.defpath)
