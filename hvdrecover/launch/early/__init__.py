"""The start of a training process, before its script: errors are reported, and the folder is noted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdrecover.errors import LaunchError
from hvdrecover.launch.python_command import parse

FOLDER = Path(__file__).parent


def environment(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a training process gets on top of its environment.

    Python finds our `sitecustomize` by them, which reports errors that come before hvdrecover is imported.

    Args:
        command: the training command.
        environ: its environment.
    """
    program = parse(command)
    if program is None or not program.customizes:
        return {}
    path = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *([path] if path else [])])}


def check(command: Sequence[str]) -> None:
    """Check that the script is there.

    Raises:
        LaunchError: it is not.
    """
    program = parse(command)
    if program is not None and not program.module and not Path(program.program).exists():
        raise LaunchError(program.program, f"there is no such script in {Path.cwd()}")
