"""A standby: a process that has imported all modules of the training, and waits to replace a lost process.

It is a new process, not a fork, so it inherits neither locks nor threads. It makes no tensor and opens no
device, so it holds no memory of an accelerator."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path

from hvdrecover import config, heartbeat, stand_in
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch.python_command import PythonCommand
from hvdrecover.launch.training import Training

logger = logging.getLogger(__name__)

CALM = 1.0  # seconds of training before a standby is started, so that it never competes with a recovery


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
        calm = (reading.phase == Phase.TRAINING and reading.commits > 0) or (
            reading.phase == Phase.PLAIN and reading.steps > 0
        )
        self._calm_since = (self._calm_since or now) if calm else None
        if self._standby is not None and self._standby.returncode is not None:
            self.drop()
            self._calm_since = now
        if self._command is None or self._standby is not None or self._calm_since is None:
            return
        modules = training.notes().get("modules")
        if modules and now - self._calm_since >= CALM:
            try:
                self._standby = start(self._command, modules, self._environ)
            except OSError as error:
                logger.warning("no standby can be kept: %s", error.strerror)
                self._command = None

    def wake(self, environ: Mapping[str, str]) -> Training | None:
        """Let the standby take over the slot; None if none is ready.

        A standby that still imports is killed: a slow import looks the same as one that never ends.
        """
        self._calm_since = None
        if self.is_warm and self._standby is not None and wake(self._standby, environ):
            woken, self._standby = self._standby, None
            return woken
        self.drop()
        return None

    def drop(self) -> None:
        if self._standby is not None:
            self._standby.close()
            self._standby = None


def start(command: PythonCommand, modules: Sequence[str], environ: Mapping[str, str]) -> Training:
    program = [command.module, command.program, *command.arguments]
    # In a memory file: a pipe would take only 64 KiB before the standby reads.
    orders = os.memfd_create("hvdrecover-orders")
    try:
        with open(orders, "w", closefd=False) as file:
            json.dump({"modules": list(modules), "program": program}, file)
        os.lseek(orders, 0, os.SEEK_SET)
        words = [*command.interpreter, "-m", __name__, str(orders)]
        return Training(words, environ, rejoins=True, stdin=subprocess.PIPE, hand_down=[orders])
    finally:
        os.close(orders)


def wake(standby: Training, environ: Mapping[str, str]) -> bool:
    """Let a standby that is ready run its program; return whether it lives."""
    stdin = standby.process.stdin
    assert stdin is not None
    standby.page.touch()
    try:
        # Does not block: the pipe has room, as this line is the only input that a standby ever gets.
        stdin.write(f"{json.dumps(dict(environ))}\n".encode())
        stdin.flush()
    except OSError:
        return False
    return True


def main() -> None:
    with os.fdopen(int(sys.argv[1])) as file:
        orders = json.load(file)
    module, program, *arguments = orders["program"]
    sys.argv = [program, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if module else str(Path(program).resolve().parent)
    stand_in.install(config.read())
    with _silence():
        _import(orders["modules"])
    heartbeat.enter(Phase.READY)
    if not (more := sys.stdin.readline()):
        return
    config.adopt(json.loads(more))
    heartbeat.enter(Phase.STARTING)
    nowhere = os.open(os.devnull, os.O_RDONLY)  # programs of a job read nothing from a terminal
    os.dup2(nowhere, 0)
    os.close(nowhere)
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
    exec(compile(path.read_bytes(), path, "exec"), main.__dict__)


def _import(modules: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            if module not in sys.modules:
                try:
                    importlib.import_module(module)
                except Exception:  # some modules are importable only through others, which import them
                    continue
    gc.freeze()  # scanning torch's modules takes 0.08 s, TensorFlow's 0.2 s


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what libraries print on import: the training process has printed it before."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for target in (1, 2):
        os.dup2(nowhere, target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # C code has its own buffer
        for target, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.close(nowhere)


if __name__ == "__main__":
    main()
