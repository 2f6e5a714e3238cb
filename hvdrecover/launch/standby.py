"""A process that has imported what training imports, and waits to take a lost process's place.

It is started anew, not forked, so it inherits neither locks nor threads. It makes no tensor and opens no
device, so it holds no memory of an accelerator.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
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

from hvdrecover import config, heartbeat
from hvdrecover.heartbeat import Phase
from hvdrecover.launch.python_command import PythonCommand
from hvdrecover.launch.training import Training


def start(command: PythonCommand, modules: Sequence[str], environ: Mapping[str, str]) -> Training:
    """Start a standby.

    Args:
        command: what it is to run.
        modules: what it imports now.
        environ: the environment of the training process.
    """
    program = [command.module, command.program, *command.arguments]
    # In memory and not through a pipe, which takes 64 KiB until its reader has come to read.
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
    """Let a standby that is ready run its program. Returns whether it lives.

    Args:
        standby: the standby.
        environ: more for its environment.
    """
    if standby.returncode is not None:
        return False
    stdin = standby.process.stdin
    assert stdin is not None
    standby.page.touch()
    try:
        # The pipe takes it, whether anybody reads or not: it is all that ever comes.
        stdin.write(f"{json.dumps(dict(environ))}\n".encode())
        stdin.flush()
    except OSError:
        return False
    return True


def main() -> None:
    """Prepare, wait, and run the program."""
    with os.fdopen(int(sys.argv[1])) as file:
        orders = json.load(file)
    module, program, *arguments = orders["program"]
    sys.argv = [program, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd()) if module else str(Path(program).resolve().parent)
    with _silence():
        _import(orders["modules"])
    heartbeat.enter(Phase.READY)
    if not (more := sys.stdin.readline()):
        return
    config.take(json.loads(more))
    heartbeat.enter(Phase.STARTING)
    _forget_input()
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        _run_file(program)


def _run_file(program: str) -> None:
    """Do as ``python FILE`` does, where `runpy.run_path` would change ``__file__`` and ``sys.argv[0]``."""
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
                except Exception:  # some can only be imported by others; they come with those
                    continue
    gc.freeze()  # modules are no garbage: a look through torch's takes 0.08 s, through TensorFlow's 0.2 s


@contextmanager
def _silence() -> Iterator[None]:
    """Return what libraries print when they are imported, the training process has printed before."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for target in (1, 2):
        os.dup2(nowhere, target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)  # of C code, which has a buffer of its own
        for target, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.close(nowhere)


def _forget_input() -> None:
    """Programs of a job read nothing from a terminal."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)


if __name__ == "__main__":
    main()
