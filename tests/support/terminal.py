"""Commands on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_a_terminal(width: int, *arguments: object, answer: str = "") -> tuple[int, str]:
    """Exit code of an ``hvdrecover`` command, and what it writes on a terminal of some columns.

    Args:
        width: the columns.
        arguments: of the command.
        answer: what is typed.
    """
    parent, child = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    command = [sys.executable, "-m", "hvdrecover", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ)
    os.close(child)
    os.write(parent, answer.encode())
    output = b""
    try:
        while piece := os.read(parent, 1 << 16):
            output += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(parent)
    return process.wait(60), output.decode()


def plain_lines(output: str) -> list[str]:
    """The lines of it, without colours and the like."""
    return _STYLES.sub("", output).splitlines()
