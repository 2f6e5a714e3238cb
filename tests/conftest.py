"""What holds for all tests: each leaves the process as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes import world


@pytest.fixture(autouse=True)
def no_fake_process_is_left() -> Iterator[None]:
    """A test that was a process of a fake job, perhaps a killed one, is none afterwards.

    Roots in memory ask which process opens them, so the next test's would be refused as a dead process's.
    """
    yield
    world.leave()
