from __future__ import annotations

import pytest

from hvdrecover.launch.training import PythonCommand, parse

RUN = [  # a command; its interpreter with options, whether it runs a module, the program, its arguments
    ("python train.py", "python", False, "train.py", ""),
    ("python3 train.py --epochs 3 -m x", "python3", False, "train.py", "--epochs 3 -m x"),
    ("/usr/bin/python3.11 a/train.py", "/usr/bin/python3.11", False, "a/train.py", ""),
    ("python -u -O train.py", "python -u -O", False, "train.py", ""),
    ("python -W error train.py x", "python -W error", False, "train.py", "x"),
    ("python -Wmodule train.py", "python -Wmodule", False, "train.py", ""),
    ("python -X dev -m train a -m b", "python -X dev", True, "train", "a -m b"),
    ("python -uW error train.py", "python -uW error", False, "train.py", ""),
    ("python -m pkg.train -c 4", "python", True, "pkg.train", "-c 4"),
    (
        "python --check-hash-based-pycs always x.py",
        "python --check-hash-based-pycs always",
        False,
        "x.py",
        "",
    ),
]


@pytest.mark.parametrize(("command", "interpreter", "module", "program", "arguments"), RUN)
def test_a_python_program_is_found(
    command: str, interpreter: str, module: bool, program: str, arguments: str
) -> None:
    expected = PythonCommand(tuple(interpreter.split()), module, program, tuple(arguments.split()))
    assert parse(command.split()) == expected


@pytest.mark.parametrize(
    "command",
    [
        *("", "./train.py", "bash train.sh", "pythonic train.py", "python", "python -", "python -c pass"),
        *("python -uc pass", "python -m", "python -Im train", "python -- train.py"),
    ],
)
def test_what_is_no_program_that_a_standby_could_run(command: str) -> None:
    assert parse(command.split()) is None
