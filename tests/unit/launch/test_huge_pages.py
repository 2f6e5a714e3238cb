from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdrecover.launch.huge_pages import asked_for
from hvdrecover.launch.training import Training
from tests.unit.launch.children import environment, until

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NBYTES = 64 << 20

# What a framework does: ask malloc for a large piece, and fill it.
SCRIPT = f"""
import ctypes, re, sys
malloc = ctypes.CDLL(None).malloc
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
ctypes.memset(malloc({NBYTES}), 1, {NBYTES})
smaps = open("/proc/self/smaps_rollup").read()
open(sys.argv[1], "w").write(re.search(r"AnonHugePages: +(\\d+) kB", smaps)[1] + "\\n")
"""


@pytest.mark.parametrize(
    ("given", "tunables"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.perturb=7"}, "glibc.malloc.perturb=7:glibc.malloc.hugetlb=1"),
    ],
)
def test_huge_pages_are_asked_for_beside_what_the_user_asks_for(
    given: Mapping[str, str], tunables: str
) -> None:
    assert asked_for({"A": "b", **given}) == {"GLIBC_TUNABLES": tunables}


@pytest.mark.parametrize("value", ["0", "1", "2"])
def test_what_the_user_says_of_huge_pages_stands(value: str) -> None:
    assert asked_for({"GLIBC_TUNABLES": f"glibc.malloc.check=0:glibc.malloc.hugetlb={value}"}) == {}


def huge_pages(tmp_path: Path, environ: Mapping[str, str]) -> int:
    """Return how many bytes in huge pages a training process has that fills 64 MB."""
    answer = tmp_path / "answer"
    answer.unlink(missing_ok=True)
    training = Training([sys.executable, "-c", SCRIPT, os.fspath(answer)], environ)
    until(lambda: training.returncode is not None, "its end")
    training.close()
    return int(answer.read_text()) << 10


def are_given_on_request() -> bool:
    kind, version = platform.libc_ver()
    is_new = kind == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return is_new and ENABLED.exists() and "[madvise]" in ENABLED.read_text()


@pytest.mark.skipif(not are_given_on_request(), reason="Linux or glibc gives no huge pages on request")
def test_a_training_process_has_its_memory_in_huge_pages_unless_the_user_says_no(tmp_path: Path) -> None:
    environ = {name: value for name, value in environment().items() if name != "GLIBC_TUNABLES"}
    assert huge_pages(tmp_path, environ) > NBYTES // 2
    assert huge_pages(tmp_path, {**environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) < NBYTES // 2
