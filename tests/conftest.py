"""What holds for all tests: each leaves the process as it found it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from hvdrecover import events
from tests.fakes import world

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has started the tests in the background; processes of theirs would be deaf to Ctrl+C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
