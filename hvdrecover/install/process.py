"""The commands of an installation: their output goes into a log, and errors quote the lines that matter."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdrecover.errors import InstallError

_ERROR = re.compile(
    r"\berror\b[: ]|CMake Error|undefined reference|Killed signal|No space left", re.IGNORECASE
)
_WIDTH, _QUOTED = 200, 20  # characters of a quoted line, and lines

# Patterns in the output of a failed command, each with its remedy; the first that matches counts.
_REMEDIES = {
    "Could NOT find CUDAToolkit|CUDAToolkit not found|Failed to find nvcc": "This PyTorch is a CUDA build "
    "and the CUDA toolkit is missing: install it, set HOROVOD_CUDA_HOME, or install PyTorch's CPU "
    "build; README tells how.",
    "cannot find -lcuda(devrt|rt_static)": "The CUDA compiler finds no libraries in lib64, because PyPI's "
    "wheels have them in lib: run `ln -s lib lib64` in HOROVOD_CUDA_HOME.",
    "Could NOT find NCCL": "Install NCCL with its headers, or set HOROVOD_NCCL_HOME to a folder with "
    "include/nccl.h and lib/libnccl.so.",
    "Could NOT find MPI": "Install an MPI with mpicxx, or set HOROVOD_WITHOUT_MPI=1.",
    "Killed signal terminated program|virtual memory exhausted": "Memory ran out: set MAKEFLAGS=-j1.",
    "No space left on device": "The disk is full: free some space, or set TMPDIR to a larger disk.",
    r'dialect\s+"CXX20"|does not know the compile\s+flags': "The compiler must know C++20: GCC 11, Clang 14, "
    "or later.",
    "externally-managed-environment": "This Python belongs to the operating system: make a virtual "
    "environment, and install there.",
    "ProxyError|No matching distribution found|Could not find a version": "pip finds no such package: behind "
    "a proxy, correct HTTPS_PROXY; without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of "
    "packages, which docs/compatibility.md lists.",
}


def relevant_tail(lines: Sequence[str]) -> list[str]:
    """Return the lines of a failed command's output that explain the failure.

    They begin at the first error; without one, they are the last lines. Long lines are cut.
    """
    kept = [line.rstrip()[:_WIDTH] for line in lines if line.strip()]
    first = next((index for index, line in enumerate(kept) if _ERROR.search(line)), None)
    return kept[-_QUOTED:] if first is None else kept[first : first + _QUOTED]


def remedy_for(lines: Sequence[str]) -> str:
    """Return the remedy for a known failure; '' for other failures."""
    text = "".join(lines)
    return next((remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, text)), "")


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that child processes are ended and folders removed."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # nohup ignores SIGHUP, and it must stay ignored
    meant = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in meant}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Runner:
    """Runs commands one after the other, shows lines about them, and writes their output to a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def run(
        self, title: str, command: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None = None
    ) -> list[str]:
        """Run a command to its end, and return the lines that it printed, standard error included.

        Raises `InstallError` if it failed; the message has the lines that say why, and the log's path.
        """
        show(f"{title} ...")
        began = time.monotonic()
        with self.log.open("a+", errors="replace") as log, ended_by_exception():
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            begin = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except OSError as error:
                raise InstallError(f"{title}: {command[0]} can't be run: {error}") from error
            try:
                status = process.wait()
            except BaseException:
                _end_group(process)
                raise
            log.seek(begin)
            lines = log.readlines()
        if status:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            excerpt = "".join(f"\n  | {line}" for line in relevant_tail(lines))
            remedy = f"\n{advice}" if (advice := remedy_for(lines)) else ""
            raise InstallError(f"{title}: failed ({how}).{excerpt}\nThe whole log: {self.log}{remedy}")
        show(f"{title}: done in {time.monotonic() - began:.1f} s")
        return lines


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes that it has started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
