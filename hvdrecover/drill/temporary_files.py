"""A record of the temporary files that a process of a drill makes, and of whether it ends by itself.

Python tells of each that `tempfile` makes, by audit events, wherever it is; so nothing about where and how
programs make them need be changed. Lines of JSON go to ``FOLDER/temporary/KIND-HOST-PID.jsonl``, if there are
any: the path of each file or folder, and ``null`` when the process ends by itself. One that is killed can't
remove its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from hvdrecover.config import Config

_MADE = ("tempfile.mkstemp", "tempfile.mkdtemp")


def watch(config: Config, kind: str) -> None:
    """Write down what this process makes from now on, if it is part of a drill.

    Args:
        config: names the drill's folder, and the host.
        kind: what the process does; one word.
    """
    if config.drill is not None:
        _watch((config.drill / "temporary" / f"{kind}-{config.host}-{os.getpid()}.jsonl").absolute())


@functools.cache  # an audit hook can't be removed
def _watch(path: Path) -> None:
    watched = os.getpid()

    def write(fact: str | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{json.dumps(fact)}\n")

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _MADE:
            write(str(Path(os.fsdecode(arguments[0])).absolute()))

    def ends() -> None:
        if os.getpid() == watched and path.exists():  # and no child that was forked from it
            write(None)

    sys.addaudithook(heard)
    atexit.register(ends)
