"""Running the commands of an installation: all output into one log, and a failure explained from it."""

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
from typing import TextIO

from hvdrecover.errors import InstallError

_ERROR = re.compile(
    r"\berror\b[: ]|CMake Error|undefined reference|Killed signal|No space left", re.IGNORECASE
)
_NOISE = re.compile(
    r"\[ *\d+%\] |cd /|/\S*/(c\+\+|g\+\+|clang\+\+|gcc|cc|cmake|ar|ranlib)(-\d+)? |\s*$"
    r"|(g?make)(\[\d+\])?: (Entering|Leaving) |copying |creating |adding '"
)
_WIDTH = 200
_PERCENT = re.compile(r"\[ *(\d{1,3})%\] ")  # as CMake's makefiles begin a line
_INTERVAL = 20.0  # the least time between two lines about one step's progress, in seconds
_POINTS = 10  # the least progress between them, in percentage points
_PATIENCE = 60.0  # the time after which a line is due without that progress, in seconds

#: What a line in the log means, and what to do about it.
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"Could NOT find CUDAToolkit|CUDAToolkit not found|Failed to find nvcc",
        "This PyTorch is a CUDA build and the CUDA toolkit is missing or incomplete: install it, set "
        "HOROVOD_CUDA_HOME, or install PyTorch's CPU build, which README tells how to get.",
    ),
    (
        r"cannot find -lcuda(devrt|rt_static)",
        "The CUDA compiler finds no libraries in lib64, as PyPI's wheels have them in lib: run "
        "`ln -s lib lib64` in HOROVOD_CUDA_HOME.",
    ),
    (
        r"Could NOT find NCCL",
        "Install NCCL with its headers, or set HOROVOD_NCCL_HOME to a "
        "folder with include/nccl.h and lib/libnccl.so.",
    ),
    (r"Could NOT find MPI", "Install an MPI with mpicxx, or set HOROVOD_WITHOUT_MPI=1."),
    (r"Killed signal terminated program|virtual memory exhausted", "Memory ran out: set MAKEFLAGS=-j1."),
    (r"No space left on device", "The disk is full: free some space, or set TMPDIR to a larger disk."),
    (
        r'dialect\s+"CXX20"|does not know the compile\s+flags',
        "The compiler must know C++20: GCC 11 or Clang 14 and later.",
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


def relevant_tail(lines: Sequence[str], count: int = 20) -> list[str]:
    """Return the lines of a failed command's output that explain the failure.

    They begin at the first error, if the output has one, else they are the last ones. Compile commands,
    progress and the like are left out, and long lines are cut.
    """
    kept = [line.rstrip()[:_WIDTH] for line in lines if not _NOISE.match(line)]
    first = next((index for index, line in enumerate(kept) if _ERROR.search(line)), None)
    return kept[-count:] if first is None else kept[first : first + count]


def remedy_for(lines: Sequence[str]) -> str | None:
    """Return what to do about a known failure, or None."""
    text = "".join(lines)
    return next((advice for pattern, advice in _REMEDIES if re.search(pattern, text)), None)


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that child processes are ended and folders removed."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    meant = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in meant}  # nohup has one ignored
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a process with all that it started."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


class Progress:
    """Writes one line when a step begins, one when it is done, and now and then one in between.

    Args:
        write: takes a line without its end.
        clock: the time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._title = ""
        self._began = self._said = 0.0
        self._percent = self._shown = 0

    def step(self, title: str) -> None:
        """Say that a step begins; the step before it is done."""
        self.finish()
        self._title = title
        self._percent = self._shown = 0
        self._began = self._said = self._clock()
        self._write(f"{title} ...")

    def watch(self, line: str) -> None:
        """Take in a line of a command's output; say at times how far the command is."""
        now = self._clock()
        if match := _PERCENT.match(line):
            self._percent = int(match[1])
        quiet, progress = now - self._said, self._percent - self._shown
        if (quiet >= _INTERVAL and progress >= _POINTS) or quiet >= _PATIENCE:
            self._said, self._shown = now, self._percent
            self._write(f"{self._title}: {self._percent} % after {now - self._began:.0f} s")

    def finish(self) -> None:
        """Say how long the last step took."""
        if self._title:
            self._write(f"{self._title}: done in {self._clock() - self._began:.1f} s")
        self._title = ""


class Runner:
    """Runs commands one after the other, and keeps what they print in a log file.

    Args:
        log: the log file; it is started afresh.
        progress: is told of each step and each line.
    """

    def __init__(self, log: Path, progress: Progress) -> None:
        self.log = log
        self.progress = progress
        self._file: TextIO | None = None

    def __enter__(self) -> Runner:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.log.open("w", errors="replace")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()

    def run(
        self, title: str, command: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None = None
    ) -> list[str]:
        """Run a command to its end.

        Returns:
            The lines that it printed, standard error included.

        Raises:
            InstallError: it failed; the message holds the lines that say why, and the log's path.
        """
        self.progress.step(title)
        try:
            lines, status = self._follow(command, environ, cwd)
        except OSError as error:
            raise InstallError(f"{title}: {command[0]} can't be run: {error}") from error
        if status:
            raise InstallError(self._explain(title, lines, status))
        return lines

    def _follow(
        self, command: Sequence[str], environ: Mapping[str, str], cwd: Path | None
    ) -> tuple[list[str], int]:
        assert self._file is not None, "Runner is a context manager"
        self._file.write(f"\n$ {shlex.join(command)}\n")
        self._file.flush()
        lines: list[str] = []
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
                    self.progress.watch(line)
                self._file.flush()
                return lines, process.wait()
            except BaseException:
                _end_group(process)
                raise

    def _explain(self, title: str, lines: Sequence[str], status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        excerpt = "".join(f"\n  | {line}" for line in relevant_tail(lines))
        advice = remedy_for(lines)
        return f"{title}: failed ({how}).{excerpt}\nThe whole log: {self.log}" + (
            f"\n{advice}" if advice else ""
        )
