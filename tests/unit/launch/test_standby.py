from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hvdrecover.heartbeat import Phase
from hvdrecover.launch.training import Training, parse, start_standby, wake
from tests.unit.launch.children import environment, state, until
from tests.unit.launch.scripts import write

FACTS = """
import os, sys
print([sys.argv, sys.path[0], __name__, os.path.normpath(__file__), __package__, __spec__ and __spec__.name,
       sys.modules["__main__"].__dict__ is globals(), os.getcwd(), sys.flags.optimize, sys.flags.dev_mode])
"""


class Captured:
    """Starts standbys whose output goes to a file."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd
        self._started: list[Training] = []

    def start(self, arguments: Sequence[str], modules: Sequence[str] = ("adapter",)) -> Training:
        command = parse([sys.executable, *arguments])
        assert command is not None
        self._started.append(start_standby(command, modules, environment()))
        return self._started[-1]

    def ready(self, arguments: Sequence[str], modules: Sequence[str] = ("adapter",)) -> Training:
        """One that has imported everything and waits."""
        started = self.start(arguments, modules)
        until(lambda: started.read().phase == Phase.READY or started.returncode is not None, "it is to wait")
        until(lambda: started.returncode is not None or state(started.pid) == "S", "it is to sleep")
        assert started.returncode is None, self.output()
        return started

    def output(self) -> tuple[str, str]:
        """Return what has been printed since the last time."""
        return self._capfd.readouterr()

    def end(self) -> None:
        for started in self._started:
            if started._descriptors:
                started.close()


@pytest.fixture
def standbys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Captured]:
    monkeypatch.chdir(tmp_path)
    standbys = Captured(tmp_path, capfd)
    yield standbys
    standbys.end()


def run(standby_: Training) -> int:
    """Wake it, and wait for its end."""
    assert wake(standby_, {})
    return standby_.process.wait(60)


@pytest.mark.parametrize(
    "arguments",
    [
        ["scripts/train.py", "--epochs", "3", ""],
        ["-u", "./scripts/../scripts/train.py"],
        ["-m", "package.train", "a b"],
        ["-m", "package"],
        ["-I", "-O", "-X", "dev", "scripts/train.py"],
        ["link/train.py"],
    ],
)
def test_a_program_finds_all_as_if_it_were_run_by_itself(standbys: Captured, arguments: list[str]) -> None:
    write(standbys.folder / "scripts", FACTS)
    write(standbys.folder / "package", FACTS)
    (standbys.folder / "package" / "__main__.py").write_text(FACTS)
    (standbys.folder / "package" / "__init__.py").write_text("")
    (standbys.folder / "link").symlink_to("scripts")
    alone = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 0, alone.stderr
    assert run(standbys.start(arguments, ["json"])) == 0
    printed, errors = standbys.output()
    assert (ast.literal_eval(printed), errors) == (ast.literal_eval(alone.stdout), "")


def test_nothing_that_modules_print_is_seen_and_all_that_the_program_prints_is(standbys: Captured) -> None:
    (standbys.folder / "loud.py").write_text(
        "import os, sys, warnings, subprocess\n"
        "print('no')\nprint('no', file=sys.stderr)\nos.write(1, b'no')\nos.write(2, b'no')\n"
        "warnings.warn('no')\nsubprocess.run(['echo', 'no'])\n"
        "import ctypes\nctypes.CDLL(None).puts(b'no')\n"
    )
    script = write(
        standbys.folder,
        "import loud, os, sys, warnings\nprint('yes')\nos.write(2, b'yes\\n')\nwarnings.warn('yes')",
    )
    woken = standbys.ready([str(script)], ["loud", "adapter"])
    assert standbys.output() == ("", "")
    assert run(woken) == 0
    printed, errors = standbys.output()
    assert printed == "yes\n"
    assert errors.startswith("yes\n") and "UserWarning: yes" in errors


def test_its_program_finds_what_it_was_given_when_it_was_woken(standbys: Captured) -> None:
    script = write(standbys.folder, "import os\nprint(ascii(os.environ['ROOT']))")
    started = standbys.ready([str(script)])
    assert wake(started, {"ROOT": "/data/ä\n\udcff"})
    assert started.process.wait(60) == 0
    assert standbys.output() == (f"{'/data/ä' + chr(10) + chr(0xDCFF)!a}\n", "")
