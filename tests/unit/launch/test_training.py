"""Real training processes and standbys, without a framework."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover.heartbeat import Phase
from hvdrecover.launch.guardian import place_in, stall_in_words
from hvdrecover.launch.training import Training, early_environment, parse, start_standby, wake
from tests.unit.launch.children import descriptors, environment, state, until

Start = Callable[..., Training]
WAIT = "\nimport signal\nwhile True:\n    signal.pause()\n"
# What a script imports in place of hvdrecover.torch.
ADAPTER = """
from types import SimpleNamespace
from hvdrecover.state import horovod as joining
functions = "broadcast_parameters broadcast_optimizer_state broadcast_object "
functions += "add_process_set remove_process_set"
native = SimpleNamespace(horovod_init=lambda *_: 1, horovod_rank=lambda: 0)
library = SimpleNamespace(mpi_lib=SimpleNamespace(), _basics=SimpleNamespace(MPI_LIB_CTYPES=native))
joining.join(
    SimpleNamespace(is_initialized=lambda: True, mpi_ops=library, **dict.fromkeys(functions.split(), print))
)
"""


def write(folder: Path, text: str) -> Path:
    """A script, with the module ``adapter`` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter.py").write_text(ADAPTER)
    script = folder / "train.py"
    script.write_text(text)
    return script


@pytest.fixture
def started() -> Iterator[list[Training]]:
    """Processes that are ended in the end."""
    found: list[Training] = []
    yield found
    for training in found:
        if training._descriptors:
            training.close()


@pytest.fixture
def start(tmp_path: Path, started: list[Training]) -> Start:
    """Start a script as a guardian does."""

    def start(text: str, *, rejoins: bool = False, **variables: str) -> Training:
        command = [sys.executable, str(write(tmp_path, text))]
        environ = {**environment(), **variables}
        environ |= early_environment(command, environ)
        started.append(Training(command, environ, rejoins=rejoins))
        return started[-1]

    return start


@pytest.fixture
def end(start: Start) -> Start:
    """Start a script, and wait for its end."""

    def end(text: str, **options: str) -> Training:
        training = start(text, **options)
        training.process.wait(60)
        return training

    return end


# -- commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "place", "module"),
    [
        ("python train.py", 1, False),
        ("python3 train.py --epochs 3 -m x", 1, False),
        ("/usr/bin/python3.11 a/train.py", 1, False),
        ("python -u -O train.py", 3, False),
        ("python -W error train.py x", 3, False),
        ("python -Wmodule train.py", 2, False),
        ("python -X dev -m train a -m b", 4, True),
        ("python -uW error train.py", 3, False),
        ("python -m pkg.train -c 4", 2, True),
        ("python --check-hash-based-pycs always x.py", 3, False),
    ],
)
def test_a_python_program_is_found_at_its_place_in_the_command(
    command: str, place: int, module: bool
) -> None:
    words = command.split()
    found = parse(words)
    assert found is not None
    assert (found.module, *found.words) == (module, *words[place:])
    assert list(found.interpreter) == words[: place - module]


@pytest.mark.parametrize(
    "command",
    [
        *("", "./train.py", "bash train.sh", "pythonic train.py", "python", "python -", "python -c pass"),
        *("python -uc pass", "python -m", "python -Im train", "python -- train.py"),
    ],
)
def test_what_is_no_program_that_a_standby_could_run(command: str) -> None:
    assert parse(command.split()) is None
    assert early_environment(command.split(), {})  # it may start Python


# -- errors --------------------------------------------------------------------------------------------

# Its other thread waits until the error has been shown.
LINGERS = """
import threading
from hvdrecover import heartbeat
heartbeat._ENDING, show, shown = 0.01, heartbeat._show, threading.Event()
heartbeat._show = lambda *words: (show(*words), shown.set())
threading.Thread(target=shown.wait).start()
1 / 0
"""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'\n"),
        ("def f(:", "SyntaxError: invalid syntax\n"),
        ("import adapter\nopen('/not')", "FileNotFoundError: [Errno 2] No such file or directory: '/not'\n"),
    ],
)
def test_an_error_is_reported_to_the_guardian_and_not_printed(
    text: str, last: str, end: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = end(text).notes()
    assert capfd.readouterr().err == ""
    assert notes["unprinted"] and notes["traceback"].endswith(last)


def test_an_error_is_known_by_its_class_and_line_as_its_text_may_vary(end: Start, tmp_path: Path) -> None:
    training = end("import json, os\ndef fail():\n    json.loads(f'{os.getpid()} !')\nfail()")
    assert training.notes()["identity"] == f"JSONDecodeError at {tmp_path / 'train.py'}:3 in fail"


def test_a_process_that_does_not_end_of_its_error_shows_it_itself(
    end: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    end(LINGERS)
    assert capfd.readouterr().err.count("ZeroDivisionError: division by zero") == 1


def test_the_script_sees_nothing_of_it_and_gets_its_own_sitecustomize(
    end: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own')")
    text = "import os, sys, sitecustomize\n"
    text += "found = [each for each in sys.path if each.endswith('early')]\n"
    text += "print(os.environ['PYTHONPATH'], sitecustomize.__file__, found)"
    end(text, PYTHONPATH=str(own))
    assert capfd.readouterr().out == f"own\n{own} {own / 'sitecustomize.py'} []\n"


def test_a_script_that_does_not_use_horovod_starts_as_fast_as_without_it(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print(*sys.modules, file=open(sys.argv[1], 'w'))")
    command, environ = [sys.executable, str(script)], environment()
    loaded = []
    for name, early in (("with", early_environment(command, environ)), ("without", {})):
        training = Training([*command, str(tmp_path / name)], {**environ, **early})
        assert training.process.wait(60) == 0
        training.close()
        loaded.append(set((tmp_path / name).read_text().split()))
    assert loaded[0] - {"sitecustomize"} == loaded[1]


# -- what a guardian learns ------------------------------------------------------------------------------


def test_what_horovod_tells_of_a_stall_is_heard_once(start: Start) -> None:
    training = start(
        "import adapter, os\n"
        "from hvdrecover import heartbeat\n"
        """os.write(int(os.environ["HOROVOD_STALL_REPORT"]), b'{"stalled": {"1": ["a", "b"]}}\\n')\n"""
        "heartbeat.notify(noted=True)\n" + WAIT
    )
    until(lambda: training.notes().get("noted"), "its note")
    assert training.stalled() == {1: ["a", "b"]}
    assert training.stalled() == {}


def test_a_stall_names_tensors_and_ranks() -> None:
    assert stall_in_words({1: ["a"], 2: ["a", "b"], 3: ["b", "c", "d", "e", "f"]}, 12.4) == (
        "a has waited 12 s for rank 1; "
        "a, b have waited 12 s for rank 2; "
        "b, c, d and 2 more have waited 12 s for rank 3"
    )


def test_a_process_that_can_tells_where_its_threads_are(start: Start, tmp_path: Path) -> None:
    training = start(
        "import adapter, threading, time\n"
        "def load(): time.sleep(1000)\n"
        "def wait_for_ever(told): told.wait()\n"
        "threading.Thread(target=load, daemon=True).start()\n"
        "wait_for_ever(threading.Event())\n"
    )
    until(lambda: training.read().phase == Phase.STARTING, "an adapter is to be imported")
    until(lambda: " in wait_for_ever" in training.stacks(), "the main thread is to wait")
    text = training.stacks()
    assert "in load" in text
    assert text.count("Current thread") == 1  # the first answer is not part of the next one
    assert place_in(text) == f"{tmp_path / 'train.py'}:3 in wait_for_ever"
    assert training.returncode is None


def test_at_the_second_commit_the_libraries_are_told_and_the_scripts_own_modules_are_not(
    end: Start, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("")
    notes = end(
        "import adapter, own, colorsys, json.tool\n"
        "__spec__ = colorsys.__spec__  # as that of a program which is part of a library\n"
        "from hvdrecover import heartbeat\n"
        "heartbeat.committed(1, 1, 1)\n"
        "heartbeat.notify(before=1)\n"
        "import wave\n"
        "heartbeat.committed(1, 2, 2)\n"
    ).notes()
    assert list(notes) == ["before", "modules"]
    assert {"colorsys", "json.tool", "wave", "hvdrecover.state.horovod"} <= set(notes["modules"])
    assert not {"own", "adapter", "__main__"} & set(notes["modules"])


def test_a_script_hands_nothing_of_it_on_to_programs_that_it_starts(start: Start) -> None:
    program = 'import os; print(os.listdir("/proc/self/fd"), [n for n in os.environ if "HVDRECOVER" in n])'
    training = start(
        "import adapter, subprocess, sys\n"
        "from hvdrecover import heartbeat\n"
        f"command = [sys.executable, '-c', {program!r}]\n"
        "heartbeat.notify(seen=subprocess.check_output(command, close_fds=False, text=True))\n",
        rejoins=True,
    )
    assert training.process.wait(60) == 0
    shown = training.notes()["seen"]
    assert shown.endswith("[]\n")
    assert not any(f"'{number}'" in shown for number in training._descriptors)


def test_closing_and_forgetting_it_frees_all_and_ends_what_is_left() -> None:
    before = descriptors()
    training = Training([sys.executable, "-c", WAIT], environment())
    assert len(descriptors()) == len(before) + 5
    training.close()
    assert training.returncode == -signal.SIGKILL
    del training
    assert descriptors() == before


# -- standbys ------------------------------------------------------------------------------------------

FACTS = """
import os, sys
def annotated(number: int): pass
print([sys.argv, sys.path[0], __name__, os.path.normpath(__file__), __package__, __spec__ and __spec__.name,
       sys.modules["__main__"].__dict__ is globals(), os.getcwd(), sys.flags.optimize, sys.flags.dev_mode,
       str(annotated.__annotations__)])
"""


@pytest.fixture
def stand_by(tmp_path: Path, started: list[Training], monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.chdir(tmp_path)

    def stand_by(*arguments: str, modules: tuple[str, ...] = ("adapter",)) -> Training:
        """Start a standby; wait until it waits, if its modules report that."""
        command = parse([sys.executable, *arguments])
        assert command is not None
        standby = start_standby(command, modules, environment())
        started.append(standby)
        if "adapter" in modules:
            until(lambda: standby.read().phase == Phase.READY, "it is to import all")
            until(lambda: state(standby.pid) == "S", "it is to sleep")
        return standby

    return stand_by


def run(standby: Training, **variables: str) -> int:
    assert wake(standby, variables)
    return standby.process.wait(60)


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
def test_a_program_finds_all_as_if_it_were_run_by_itself(
    stand_by: Start, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    write(Path("scripts"), FACTS)
    write(Path("package"), FACTS).with_name("__main__.py").write_text(FACTS)
    Path("package", "__init__.py").write_text("")
    Path("link").symlink_to("scripts")
    alone = subprocess.run(
        [sys.executable, *arguments], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 0, alone.stderr
    assert run(stand_by(*arguments, modules=("json",))) == 0
    printed, errors = capfd.readouterr()
    assert (ast.literal_eval(printed), errors) == (ast.literal_eval(alone.stdout), "")


def test_nothing_that_modules_print_is_seen_and_all_that_the_program_prints_is(
    stand_by: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("loud.py").write_text(
        "import os, sys, warnings, subprocess\n"
        "print('no')\nprint('no', file=sys.stderr)\nos.write(1, b'no')\nos.write(2, b'no')\n"
        "warnings.warn('no')\nsubprocess.run(['echo', 'no'])\n"
        "import ctypes\nctypes.CDLL(None).puts(b'no')\n"
    )
    text = "import loud, os, sys, warnings\nprint('yes')\nos.write(2, b'yes\\n')\nwarnings.warn('yes')"
    woken = stand_by(str(write(tmp_path, text)), modules=("loud", "adapter"))
    assert capfd.readouterr() == ("", "")
    assert run(woken) == 0
    printed, errors = capfd.readouterr()
    assert printed == "yes\n"
    assert errors.startswith("yes\n") and "UserWarning: yes" in errors


def test_its_program_finds_what_it_was_given_when_it_was_woken(
    stand_by: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, "import os\nprint(ascii(os.environ['ROOT']))")
    assert run(stand_by(str(script)), ROOT="/data/ä\n\udcff") == 0
    assert capfd.readouterr() == ("'/data/\\xe4\\n\\udcff'\n", "")
