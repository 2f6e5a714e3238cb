"""What holds for all tests: each leaves the process as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdrecover import events
from tests.fakes import world


@pytest.fixture(autouse=True)
def no_fake_process_is_left() -> Iterator[None]:
    """A test that was a process of a fake job, perhaps a killed one, is none afterwards.

    Roots in memory ask which process opens them, so the next test's would be refused as a dead process's.
    """
    yield
    world.leave()


@pytest.fixture(autouse=True)
def the_level_of_messages_is_left_as_found() -> Iterator[None]:
    """A run sets the level of its own lines; the next test sees what it would have seen alone."""
    level = events.logger.level
    yield
    events.logger.setLevel(level)
