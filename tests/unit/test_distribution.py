"""Builds of the package: which extras there are, and what happens without a C compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build_extensions(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Compile the C files of a copy of the package into `folder`."""
    shutil.copy(ROOT / "setup.py", folder)
    for source in ROOT.glob("hvdrecover/*/_*.c"):
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copy(source, target)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True)


def test_without_a_c_compiler_the_c_files_are_left_out(tmp_path: Path) -> None:
    built = build_extensions(tmp_path, CC="/no/such/compiler", HVDRECOVER_REQUIRE_C="")
    assert built.returncode == 0, built.stderr
    assert not [*tmp_path.rglob("*.so")]


def test_a_release_build_without_a_c_compiler_fails(tmp_path: Path) -> None:
    built = build_extensions(tmp_path, CC="/no/such/compiler", HVDRECOVER_REQUIRE_C="1")
    assert built.returncode != 0
    assert "/no/such/compiler" in built.stderr


@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf (binutils) is not installed")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs ELF files")
def test_the_c_parts_name_the_c_library_as_auditwheel_requires(tmp_path: Path) -> None:
    built = build_extensions(tmp_path, HVDRECOVER_REQUIRE_C="1")
    assert built.returncode == 0, built.stderr
    extensions = [*tmp_path.rglob("*.abi3.so")]
    assert len(extensions) == 2
    for each in extensions:
        shown = subprocess.run(["readelf", "--dynamic", each], capture_output=True, text=True, check=True)
        assert re.search(r"NEEDED.*\[libc\.", shown.stdout)
