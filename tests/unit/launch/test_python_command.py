from __future__ import annotations

import pytest

from hvdrecover.launch.python_command import PythonCommand, parse

RUN = [
    ("python train.py", PythonCommand(("python",), False, "train.py", ())),
    (
        "python3 train.py --epochs 3 -m x",
        PythonCommand(("python3",), False, "train.py", ("--epochs", "3", "-m", "x")),
    ),
    ("/usr/bin/python3.11 a/train.py", PythonCommand(("/usr/bin/python3.11",), False, "a/train.py", ())),
    ("python -u -O train.py", PythonCommand(("python", "-u", "-O"), False, "train.py", ())),
    ("python -W error train.py x", PythonCommand(("python", "-W", "error"), False, "train.py", ("x",))),
    ("python -Wmodule train.py", PythonCommand(("python", "-Wmodule"), False, "train.py", ())),
    (
        "python -X dev -m train a -m b",
        PythonCommand(("python", "-X", "dev"), True, "train", ("a", "-m", "b")),
    ),
    ("python -Ximporttime train.py", PythonCommand(("python", "-Ximporttime"), False, "train.py", ())),
    ("python -uW error train.py", PythonCommand(("python", "-uW", "error"), False, "train.py", ())),
    ("python -m pkg.train -c 4", PythonCommand(("python",), True, "pkg.train", ("-c", "4"))),
    (
        "python --check-hash-based-pycs always train.py",
        PythonCommand(("python", "--check-hash-based-pycs", "always"), False, "train.py", ()),
    ),
]


@pytest.mark.parametrize(("command", "found"), RUN)
def test_a_python_program_is_found(command: str, found: PythonCommand) -> None:
    assert parse(command.split()) == found


@pytest.mark.parametrize(
    "command",
    [
        "",
        "./train.py",
        "bash train.sh",
        "pythonic train.py",
        "python",
        "python -",
        "python -c pass",
        "python -uc pass",
        "python -m",
        "python -Im train",
        "python -- train.py",
    ],
)
def test_what_is_no_program_that_a_standby_could_run(command: str) -> None:
    assert parse(command.split()) is None
