"""Keeping the environment off command lines, which every user of a host can read.

Horovod writes the whole environment, with credentials for storage in it and the supervisor's token, into the
commands by which it starts workers. Workers on this host inherit it anyway. Those on other hosts get it
through ssh's input (`main`, which the ``ssh`` of ``launch/ssh.py`` calls).
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence

from hvdrecover import config

MARK = "HVDRECOVER_START"  # stays on the commands that start workers, and tells them from others
# Horovod's options and NCCL's are changed on the way, so they have to stay; a shell keeps some for itself.
_KEPT = re.compile(
    rf"{MARK}|HOROVOD_.*|NCCL_.*|PYTHONUNBUFFERED|_|PWD|SHLVL|UID|EUID|PPID|BASHOPTS|SHELLOPTS|BASH_VERSINFO"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What Horovod does not hand on either: it means nothing on another host.
_NOT_HANDED_ON = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")


def hidden(names: Iterable[str]) -> list[str]:
    """The names of variables that need not stand on command lines."""
    return [name for name in names if _NAME.fullmatch(name) and not _KEPT.fullmatch(name)]


def script(command: str, environ: Mapping[str, str]) -> str:
    """Return what a shell on another host reads: it sets the hidden variables, and becomes the command."""
    names = [name for name in hidden(environ) if not _NOT_HANDED_ON.match(name)]
    lines = [f"export {name}={shlex.quote(environ[name])}" for name in sorted(names)]
    return "\n".join([*lines, f"exec /bin/sh -c {shlex.quote(command)} </dev/null", ""])


def main(arguments: Sequence[str]) -> None:
    """Become ``ssh``, with the environment as its input.

    Args:
        arguments: ssh's path and its arguments, of which the last is the command.
    """
    *words, command = arguments
    given = os.memfd_create("hvdrecover-environment")
    with os.fdopen(os.dup(given), "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(script(command, config.environment()))
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.execv(words[0], [*words, "exec /bin/sh -s"])


if __name__ == "__main__":
    main(sys.argv[1:])
