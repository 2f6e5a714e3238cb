"""The commands of an installation: their output goes into a log, and errors quote the lines that matter."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hvdrecover.errors import InstallError

_ERROR = re.compile(
    r"\berror\b[: ]|CMake Error|undefined reference|Killed signal|No space left", re.IGNORECASE
)
_NOISE = re.compile(
    r"\[ *\d+%\] |cd /|/\S*/(c\+\+|g\+\+|clang\+\+|gcc|cc|cmake|ar|ranlib)(-\d+)? |\s*$"
    r"|(g?make)(\[\d+\])?: (Entering|Leaving) |copying |creating |adding '"
)
_WIDTH = 200  # characters of a quoted line
_PERCENT = re.compile(r"\[ *(\d{1,3})%\] ")  # CMake's makefiles begin lines with it
_INTERVAL = 30.0  # seconds between two lines about the progress of one step

_REMEDIES = (
    (
        r"Could NOT find CUDAToolkit|CUDAToolkit not found|Failed to find nvcc",
        "This PyTorch is a CUDA build and the CUDA toolkit is missing or incomplete: install it, set "
        "HOROVOD_CUDA_HOME, or install PyTorch's CPU build; README tells how.",
    ),
    (
        r"cannot find -lcuda(devrt|rt_static)",
        "The CUDA compiler finds no libraries in lib64, because PyPI's wheels have them in lib: run "
        "`ln -s lib lib64` in HOROVOD_CUDA_HOME.",
    ),
    (
        r"Could NOT find NCCL",
        "Install NCCL with its headers, or set HOROVOD_NCCL_HOME to a folder with include/nccl.h and "
        "lib/libnccl.so.",
    ),
    (r"Could NOT find MPI", "Install an MPI with mpicxx, or set HOROVOD_WITHOUT_MPI=1."),
    (r"Killed signal terminated program|virtual memory exhausted", "Memory ran out: set MAKEFLAGS=-j1."),
    (r"No space left on device", "The disk is full: free some space, or set TMPDIR to a larger disk."),
    (
        r'dialect\s+"CXX20"|does not know the compile\s+flags',
        "The compiler must know C++20: GCC 11, Clang 14, or later.",
    ),
    (
        r"ProxyError|[Cc]annot connect to proxy|Tunnel connection failed",
        "pip gets no answer through the proxy: correct or unset HTTPS_PROXY.",
    ),
    (
        r"externally-managed-environment",
        "This Python belongs to the operating system: make a virtual environment, and install there.",
    ),
    (
        r"No matching distribution found|Could not find a version",
        "pip finds no such package: behind a proxy, set HTTPS_PROXY; without a network, set "
        "PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of packages, which docs/compatibility.md lists.",
    ),
)
"""Patterns in the output of a failed command, each with its remedy; the first that matches counts."""


def relevant_tail(lines: Sequence[str], count: int = 20) -> list[str]:
    """Return the lines of a failed command's output that explain the failure.

    They begin at the first error; without one, they are the last lines. Compile commands and progress are
    left out, and long lines are cut.
    """
    kept = [line.rstrip()[:_WIDTH] for line in lines if not _NOISE.match(line)]
    first = next((index for index, line in enumerate(kept) if _ERROR.search(line)), None)
    return kept[-count:] if first is None else kept[first : first + count]


def remedy_for(lines: Sequence[str]) -> str:
    """Return the remedy for a known failure; '' for other failures."""
    text = "".join(lines)
    return next((remedy for pattern, remedy in _REMEDIES if re.search(pattern, text)), "")


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that child processes are ended and folders removed."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # nohup ignores SIGHUP, and it must stay ignored
    meant = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in meant}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a process and all processes that it has started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


class Runner:
    """Runs commands one after the other, says how far they are, and writes their output to a log file.

    Args:
        log: the log file; an earlier one is replaced.
        show: shows a line about the progress.
    """

    def __init__(self, log: Path, show: Callable[[str], object]) -> None:
        self.log = log
        self.show = show
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = log.open("w", errors="replace")

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def run(
        self, title: str, command: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None = None
    ) -> list[str]:
        """Run a command to its end, and return the lines that it printed, standard error included.

        Raises:
            InstallError: it failed; the message has the lines that say why, and the log's path.
        """
        self.show(f"{title} ...")
        began = time.monotonic()
        try:
            lines, status = self._follow(title, command, environ, cwd)
        except OSError as error:
            raise InstallError(f"{title}: {command[0]} can't be run: {error}") from error
        if status:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            excerpt = "".join(f"\n  | {line}" for line in relevant_tail(lines))
            remedy = f"\n{advice}" if (advice := remedy_for(lines)) else ""
            raise InstallError(f"{title}: failed ({how}).{excerpt}\nThe whole log: {self.log}{remedy}")
        self.show(f"{title}: done in {time.monotonic() - began:.1f} s")
        return lines

    def _follow(
        self, title: str, command: Sequence[str], environ: Mapping[str, str], cwd: Path | None
    ) -> tuple[list[str], int]:
        """Return the command's output and exit status; show at times how far it is."""
        self._file.write(f"\n$ {shlex.join(command)}\n")
        self._file.flush()
        lines: list[str] = []
        began = shown = time.monotonic()
        with (
            ended_by_exception(),
            subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    self._file.write(line)
                    lines.append(line)
                    now = time.monotonic()
                    if now - shown >= _INTERVAL and (percent := _PERCENT.match(line)):
                        shown = now
                        self.show(f"{title}: {percent[1]} % after {now - began:.0f} s")
                self._file.flush()
                return lines, process.wait()
            except BaseException:
                _end_group(process)
                raise
