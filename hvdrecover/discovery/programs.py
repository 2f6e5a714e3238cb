"""Other programs, asked for what they print."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hvdrecover.errors import DiscoveryError

_KILLED = 5.0  # seconds for a killed program to end; one that waits for a disk may never do so


def output(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> bytes:
    """Return what a program prints.

    Args:
        command: program and arguments; the program is looked up on the environment's ``PATH``.
        environ: its environment.
        timeout: seconds after which it is killed, with all that it has started.

    Raises:
        DiscoveryError: it can't be started, has failed, or has not ended in time.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise DiscoveryError(name, f"can't be started: {error.strerror}") from error
    try:
        printed, complaints = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(name, f"has not ended in {timeout:.2g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)
    if process.returncode:
        reason = f"has ended with exit code {process.returncode}"
        raise DiscoveryError(name, ": ".join([reason, *_last_words(complaints)]))
    return printed


def _last_words(complaints: bytes) -> list[str]:
    """The last line that says something, and is not a rule or frame."""
    lines = complaints.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if any(map(str.isalpha, line))][-1:]
