"""Run another program and return its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hvdrecover.errors import DiscoveryError

_KILLED = 5.0  # seconds for a killed program to end; one that waits for a disk may never do so


def output(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> bytes:
    """Return the output of a program. After `timeout` seconds it is killed with all its processes.

    Raises `DiscoveryError` if it cannot be started, fails, or does not end in time.
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
        raise DiscoveryError(name, f"cannot be started: {error.strerror}") from error
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(name, f"has not ended in {timeout:.2g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)
    if process.returncode:
        # The last line with a letter: many programs end their errors with a rule or a frame.
        lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
        last = [line for line in lines if any(map(str.isalpha, line))][-1:]
        raise DiscoveryError(name, ": ".join([f"has ended with exit code {process.returncode}", *last]))
    return printed
