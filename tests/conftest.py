"""The fixtures of all tests: each leaves the process as it found it."""

from __future__ import annotations

import gc
import re
import signal
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from hvdrecover import events
from tests.fakes import world

gc.set_threshold(300_000, 10, 10)  # looking for garbage among ten thousand tests takes long

# A shell that starts the tests in the background, or nohup, has them and all their processes ignore signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)


# Files of tests that take long, the longest first: one that came last would leave the other processes idle.
LONGEST = [
    "test_ends",
    "test_doctor",
    "test_endings",
    "test_jobs",
    "test_guardians",
    "test_crash_steps",
    "test_plain_fit",
    "test_resume",
    "test_kill_and_resume",
    "test_faults",
    "test_drill",
    "test_near",
    "test_elastic",
    "test_keras_callbacks",
    "test_tensorflow_failures",
    "test_pages",
    "test_rollbacks",
    "test_out_of_step",
    "test_outages",
    "test_irregular",
    "test_horovods_scripts",
    "test_gradients",
    "test_scalars",
    "test_virtual",
    "test_plain_scripts",
    "test_virtual_tensorflow",
    "test_watch",
    "test_slurm",
    "test_launchers",
    "test_data_changes",
    "test_drop_in",
    "test_lost_peer",
    "test_storages",
]


class ByFileAndFramework(LoadFileScheduling):
    """Has one process do the tests of a file and a framework: they share what fixtures start."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.startswith("tests/simulation/"):
            return nodeid  # these share nothing
        frameworks = {"torch", "tensorflow"} & set(re.split(r"[\[\]-]", test))
        return " ".join([file, *sorted(frameworks)])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return ByFileAndFramework(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported and collected stays to the end


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
