from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdrecover.launch.training import Training, early_environment
from tests.unit.launch.children import environment
from tests.unit.launch.scripts import write

# Its other thread waits until the error has been shown.
LINGERS = """
import threading
from hvdrecover import uncaught
uncaught._PATIENCE, show, shown = 0.01, uncaught._show, threading.Event()
uncaught._show = lambda *words: (show(*words), shown.set())
threading.Thread(target=shown.wait).start()
1 / 0
"""


def run(script: Path, tmp_path: Path, **variables: str) -> Training:
    """A script that has ended as a training process does."""
    command = [sys.executable, str(script)]
    environ = {**environment(), **variables}
    training = Training(command, {**environ, **early_environment(command, environ)})
    training.process.wait(60)
    return training


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'\n"),
        ("def f(:", "SyntaxError: invalid syntax\n"),
        (
            "import adapter\nopen('/not/there')",
            "FileNotFoundError: [Errno 2] No such file or directory: '/not/there'\n",
        ),
    ],
)
def test_an_error_is_reported_to_the_guardian_and_not_printed(
    text: str, last: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = run(write(tmp_path, text), tmp_path)
    assert capfd.readouterr().err == ""
    notes = training.notes()
    training.close()
    assert notes["unprinted"] and notes["traceback"].endswith(last)


def test_an_error_is_known_by_its_class_and_line_as_its_text_may_vary(tmp_path: Path) -> None:
    text = "import json, os\ndef fail():\n    json.loads(f'{os.getpid()} !')\nfail()"
    training = run(script := write(tmp_path, text), tmp_path)
    assert training.notes()["identity"] == f"JSONDecodeError at {script}:3 in fail"
    training.close()


def test_a_process_that_does_not_end_of_its_error_shows_it_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = run(write(tmp_path, LINGERS), tmp_path)
    training.close()
    assert capfd.readouterr().err.count("ZeroDivisionError: division by zero") == 1


def test_the_script_sees_nothing_of_it_and_gets_its_own_sitecustomize(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    text = "import os, sys, sitecustomize\n"
    text += "print(os.environ['PYTHONPATH'], sitecustomize.__file__, [p for p in sys.path if 'early' in p])"
    run(write(tmp_path, text), tmp_path, PYTHONPATH=str(tmp_path / "own")).close()
    own = tmp_path / "own"
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
