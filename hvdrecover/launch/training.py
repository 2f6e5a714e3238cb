"""The processes of a slot: the training process, and a standby that has imported its modules."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import mmap
import os
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePath
from typing import Any

from hvdrecover import config, heartbeat, stand_in
from hvdrecover.heartbeat import Page, Phase, Reading
from hvdrecover.launch import processes, waits
from hvdrecover.launch.link import decoded

logger = logging.getLogger(__name__)

CALM = 1.0  # seconds of training before a standby is started, so that it never competes with a recovery
EARLY = Path(__file__).parent / "early"  # the folder of our `sitecustomize`
_PIPE = 1 << 18  # bytes of events that wait until the guardian looks, a few times a second
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb"
_INTERPRETER = re.compile(r"python(\d+(\.\d+)*)?")
_ISOLATED = re.compile(r"-[^-WX]*[EIS].*")  # no environment variables, or no site
_FLAGS = re.compile(r"-[^-WXcm]*(?P<last>[WXcm])(?P<value>.*)")  # several in a word; these take what follows


# -- commands ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PythonCommand:
    interpreter: tuple[str, ...]  # the interpreter with its own options
    module: bool  # whether the program is a module (``-m``), else it is a file
    words: tuple[str, ...]  # the module or file, and its arguments


def parse(command: Sequence[str]) -> PythonCommand | None:
    """Take a command apart; None if it does not run a Python program from a file or a module."""
    if not command or not _INTERPRETER.fullmatch(PurePath(command[0]).name):
        return None
    place = 1
    while place < len(command):
        word = command[place]
        module = word == "-m" and place + 1 < len(command)
        if module or not word.startswith("-"):
            return PythonCommand(tuple(command[:place]), module, tuple(command[place + module :]))
        flags = _FLAGS.fullmatch(word)
        if word in ("-", "--") or (flags and flags["last"] in "cm"):
            return None
        place += 2 if word == "--check-hash-based-pycs" or (flags and not flags["value"]) else 1
    return None


def early_environment(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make Python run our `sitecustomize` first: it installs `stand_in`."""
    # Another program, such as a shell or a script with a ``#!`` line, may start Python.
    program = parse(command)
    if program is not None and any(_ISOLATED.fullmatch(word) for word in program.interpreter[1:]):
        return {}
    path = environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(EARLY), *([path] if path else [])])}


# -- the training process ------------------------------------------------------------------------------


class Training:
    """A training process, or a standby."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rejoins: bool = False,
        stdin: int | None = None,
        hand_down: Sequence[int] = (),
    ) -> None:
        # Memory shared with the guardian; it has no name, so no file is left behind after a kill.
        self._descriptors = [os.memfd_create(f"hvdrecover-{name}") for name in ("page", "stacks", "notes")]
        page, self._stacks, self._notes = self._descriptors
        self._events, events = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._unread = b""  # the beginning of an event whose rest has not arrived
        # Linux limits each user's memory in pipes. Beyond the limit, the size stays 64 KiB.
        with contextlib.suppress(OSError):
            fcntl.fcntl(events, fcntl.F_SETPIPE_SZ, _PIPE)
        os.ftruncate(page, heartbeat.SIZE)
        self.page = Page.from_buffer(mmap.mmap(page, heartbeat.SIZE))
        self.page.begin(Phase.UNKNOWN)
        self._seen = 0
        self._left = False
        kept = [*self._descriptors, events]
        settings = {
            "HVDRECOVER_SLOT": ",".join(map(str, kept)),
            "HOROVOD_STALL_REPORT": str(self._notes),
            **_huge_pages(environ),
        }
        if rejoins:
            settings["HVDRECOVER_REJOIN"] = "1"
        try:
            self.process = processes.start(
                command, {**environ, **settings}, hand_down=[*kept, *hand_down], stdin=stdin
            )
        finally:
            os.close(events)
        self._descriptors.append(self._events)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Return its exit code, or None while it runs; a process that cannot be killed counts as killed."""
        code = self.process.poll()
        return -signal.SIGKILL if code is None and self._left else code

    def read(self) -> Reading:
        return self.page.read()

    def notes(self) -> dict[str, Any]:
        return heartbeat.notes_since(self._notes, 0)

    def events(self) -> list[dict[str, Any]]:
        data = self._unread
        with contextlib.suppress(BlockingIOError):
            while new := os.read(self._events, _PIPE):
                data += new
        found, self._unread = decoded(data)  # children of the process may write there, too
        return found

    def stalled(self) -> dict[int, list[str]]:
        """Return which tensors wait for which ranks, if Horovod has reported that since the last call."""
        # Horovod reports them on rank 0 only, and whenever it ends a stall.
        seen, self._seen = self._seen, os.fstat(self._notes).st_size
        stalled = heartbeat.notes_since(self._notes, seen).get("stalled", {})
        return {int(rank): names for rank, names in stalled.items()}

    def stacks(self) -> str:
        """Ask the process for its stacks, and return them; '' if it does not answer."""
        before = size = os.fstat(self._stacks).st_size
        os.kill(self.pid, config.STACKS_SIGNAL)
        deadline = time.monotonic() + waits.STACKS
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.fstat(self._stacks).st_size
            if now > before and now == size:  # the answer is complete
                return os.pread(self._stacks, now - before, before).decode(errors="replace")
            size = now
        return ""

    def kill(self) -> bool:
        """SIGKILL it and its process group, wait, and return whether it ended; if not, log it."""
        self.process.kill_group()
        if self._left or self.process.ends():
            return not self._left
        self._left = True
        logger.error("%s can't be killed, as a disk hangs perhaps: left", processes.named([self.pid]))
        return False

    def close(self) -> None:
        """Kill its process group, and free its memory."""
        self.kill()
        if self.process.stdin is not None:
            self.process.stdin.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def _huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which glibc (from 2.35 on) asks for huge pages, unless the user has set it."""
    # Else a killed process with a state of 1 GB frees 250,000 pages before its death is reported.
    given = environ.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return {}
    return {_TUNABLES: ":".join([*([given] if given else []), f"{_HUGE_PAGES}=1"])}


# -- the standby, as its guardian sees it ---------------------------------------------------------------


class Readiness:
    """Keeps the standby of one slot: starts it in calm training, replaces a dead one, wakes it."""

    def __init__(self, command: PythonCommand | None, environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._standby: Training | None = None
        self._calm_since: float | None = None
        self._reported = False

    @property
    def is_warm(self) -> bool:
        standby = self._standby
        return standby is not None and standby.returncode is None and standby.read().phase == Phase.READY

    def news(self) -> bool | None:
        before, self._reported = self._reported, self.is_warm
        return self._reported if self._reported != before else None

    def keep(self, training: Training, reading: Reading, now: float) -> None:
        """Start a standby when training has been calm for a while, and replace one that has ended."""
        done = {Phase.TRAINING: reading.commits, Phase.PLAIN: reading.steps}
        calm = done.get(reading.phase, 0) > 0
        self._calm_since = (self._calm_since or now) if calm else None
        if self._standby is not None and self._standby.returncode is not None:
            self.drop()
            self._calm_since = now
        if self._command is None or self._standby is not None or self._calm_since is None:
            return
        modules = training.notes().get("modules")
        if modules and now - self._calm_since >= CALM:
            try:
                self._standby = start_standby(self._command, modules, self._environ)
            except OSError as error:
                logger.warning("no standby can be kept: %s", error.strerror)
                self._command = None

    def wake(self, environ: Mapping[str, str]) -> Training | None:
        """Let the standby take over the slot; None if none is ready."""
        self._calm_since = None
        if self.is_warm and self._standby is not None and wake(self._standby, environ):
            woken, self._standby = self._standby, None
            return woken
        self.drop()  # also while it imports: a slow import looks the same as one that never ends
        return None

    def drop(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None


def start_standby(command: PythonCommand, modules: Sequence[str], environ: Mapping[str, str]) -> Training:
    # A new process, not a fork, inherits neither locks nor threads. It makes no tensor and opens no device,
    # so it holds no memory of an accelerator.
    # The orders are in a memory file: a pipe would take only 64 KiB before the standby reads.
    orders = os.memfd_create("hvdrecover-orders")
    try:
        with open(orders, "w", closefd=False) as file:  # no deadline: a file in memory
            json.dump({"modules": list(modules), "module": command.module, "words": command.words}, file)
        os.lseek(orders, 0, os.SEEK_SET)
        words = [*command.interpreter, "-m", __name__, "standby", str(orders)]
        return Training(words, environ, rejoins=True, stdin=subprocess.PIPE, hand_down=[orders])
    finally:
        os.close(orders)


def wake(standby: Training, environ: Mapping[str, str]) -> bool:
    """Let a standby that is ready run its program; return whether it lives."""
    stdin = standby.process.stdin
    assert stdin is not None
    standby.page.touch()
    try:
        # The pipe takes 64 KiB without a reader, and this line is the only input that a standby ever gets.
        stdin.write(f"{json.dumps(dict(environ))}\n".encode())  # no deadline: the pipe has room
        stdin.flush()  # no deadline: the pipe has room
    except OSError:
        return False
    return True


# -- the program of a standby ---------------------------------------------------------------------------


def main() -> None:
    with os.fdopen(int(sys.argv[2])) as file:
        orders = json.load(file)
    module, sys.argv = orders["module"], orders["words"]
    program = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if module else str(Path(program).resolve().parent)
    stand_in.install(config.read())
    with _silence():
        _import(orders["modules"])
    heartbeat.enter(Phase.READY)
    if not (more := sys.stdin.readline()):  # no deadline: woken when a process is lost
        return
    config.adopt(json.loads(more))
    heartbeat.enter(Phase.STARTING)
    # Programs of a job read nothing from a terminal.
    with Path(os.devnull).open() as nowhere:  # no deadline: /dev/null
        os.dup2(nowhere.fileno(), 0)
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        _run_file(program)


def _run_file(program: str) -> None:
    """Do as ``python FILE`` does; `runpy.run_path` would change ``__file__`` and ``sys.argv[0]``."""
    if pkgutil.get_importer(program) is not None:
        runpy.run_path(program, run_name="__main__")
        return
    path = Path.cwd() / program
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.fspath(path)
    main.__loader__ = SourceFileLoader("__main__", os.fspath(path))
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), main.__dict__)


def _import(modules: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            with contextlib.suppress(Exception):  # some are importable only through others, which do it
                importlib.import_module(module)
    gc.freeze()  # scanning torch's modules takes 0.08 s, TensorFlow's 0.2 s


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard what libraries print on import: the training process has printed it before."""
    kept = {target: os.dup(target) for target in (1, 2)}
    with Path(os.devnull).open("w") as nowhere:  # no deadline: /dev/null
        for target in kept:
            os.dup2(nowhere.fileno(), target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # C code has its own buffer
        for target, descriptor in kept.items():
            os.dup2(descriptor, target)
            os.close(descriptor)


if __name__ == "__main__":
    main()
