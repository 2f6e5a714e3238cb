from __future__ import annotations

import os
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from hvdrecover.drill.checks import machine, rules
from hvdrecover.drill.checks.machine import Size
from tests.unit.launch.children import child, line


def test_the_size_of_a_process_counts_its_open_files() -> None:
    before = machine.size_of(os.getpid())
    with Path(os.devnull).open():
        after = machine.size_of(os.getpid())
    assert before is not None and after is not None
    assert (after.files - before.files, after.memory > 0) == (1, True)


def test_a_process_that_is_gone_has_no_size() -> None:
    with child("pass") as ended:
        ended.wait()
    assert machine.size_of(ended.pid) is None
    assert machine.shared_memory(ended.pid) == set()


def test_a_file_in_shared_memory_that_outlives_who_has_mapped_it_is_found() -> None:
    memory = shared_memory.SharedMemory(create=True, size=100)
    try:
        mapped = machine.shared_memory(os.getpid())
        (found,) = machine.leftovers(mapped)
        assert found.rule is rules.NO_SHARED_MEMORY
        assert memory.name.removeprefix("/") in found.message
    finally:
        memory.close()
        memory.unlink()
    assert machine.leftovers(mapped) == []


def test_a_process_that_is_left_is_named_by_its_command() -> None:
    with child("import signal; print(flush=True); signal.pause()") as left:
        line(left)
        (found,) = machine.orphans([left.pid])
        assert f"{left.pid} ({sys.executable}" in found.message
    assert machine.orphans([]) == []


@pytest.mark.parametrize(
    ("files", "memory", "grows"),
    [
        ([10] * 6, [100] * 6, False),
        ([10, 15, 10, 15, 15, 10], [100, 120, 100, 120, 120, 100], False),  # a standby comes and goes
        ([10, 13, 16, 19, 22, 25], [100] * 6, True),
        ([10] * 6, [100, 120, 140, 160, 180, 200], True),
        ([10, 20, 30], [100, 200, 300], False),  # too few to tell
    ],
)
def test_what_grows_with_each_fault_is_found(files: list[int], memory: list[int], grows: bool) -> None:
    sizes = [Size(*each) for each in zip(files, (each << 20 for each in memory), strict=True)]
    found = machine.growth([[Size(1, 1)] * 6, sizes])
    assert [each.rule for each in found] == [rules.NO_GROWTH] * grows


def test_an_exit_code_that_a_scheduler_would_not_understand_is_found() -> None:
    assert machine.exits(0, 0) == []
    (found,) = machine.exits(1, 75)
    assert "exit code 1 instead of 75" in found.message
