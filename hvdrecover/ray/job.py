"""Jobs on a Ray cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdrecover.config import PREEMPTED
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.launch import processes as children
from hvdrecover.ray.actor import python_path
from hvdrecover.ray.exchange import Exchange
from hvdrecover.ray.roster import Request, Roster

_SHELL, _FUNCTION = "hvdrecover.ray.shell", "hvdrecover.ray.function"  # programs
_INTERRUPTED = 60.0  # seconds for a job to end that is to end at once

Result = TypeVar("Result")


@dataclass(frozen=True)
class Slots:
    """Slots that Ray has given, for ``hvdrecover run`` or ``drill``.

    Attributes:
        options: of the command: where it finds hosts.
        environ: its environment: how it starts processes there.
        key: what who starts processes there must know.
    """

    options: tuple[str, ...]
    environ: Mapping[str, str]
    key: str


@contextmanager
def slots(
    processes: int,
    *,
    most: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    timeout: float = 600.0,
) -> Iterator[Slots]:
    """Hold slots of a Ray cluster in actors, and start the processes of a job in them instead of by ssh.

    Args:
        processes: how many slots; Ray gives all of them at once, or waits.
        most: how many there may be: more are taken as soon as there is room.
        cpus: of each slot.
        gpus: of each slot.
        resources: other resources of each slot, by Ray's names.
        timeout: seconds to wait for the slots.

    Raises:
        ConfigError: this process is not on a node of the cluster, or Ray is not installed.
        LaunchError: there are not enough slots in time.

    Examples:
        >>> with hvdrecover.ray.slots(4) as held:  # doctest: +SKIP
        ...     command = ["hvdrecover", "run", "-np", "4", *held.options, "--", "python", "train.py"]
        ...     subprocess.run(command, env=held.environ)
    """
    connected()
    wanted = {"CPU": cpus, "GPU": gpus, **(resources or {})}
    amounts = {name: float(amount) for name, amount in wanted.items() if amount}
    folder = Path(tempfile.mkdtemp(prefix="hvdrecover-ray-"))  # which only its owner may read
    try:
        roster = Roster(Request(processes, max(processes, most or 0), amounts, timeout), folder)
        try:
            words = [
                "file",
                "--no-ssh-check",
                "--cache",
                os.fspath(folder / "cache"),
                os.fspath(roster.hosts),
            ]
            program = [sys.executable, "-m", _SHELL, os.fspath(roster.seats)]
            own = {"HVDRECOVER_REMOTE_SHELL": shlex.join(program), "PYTHONPATH": python_path()}
            options = ("--network-interface", interface(), "--discover", shlex.join(words))
            yield Slots(options, {**os.environ, **own}, roster.key)
        finally:
            roster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(
    train: Callable[[], Result],
    processes: int,
    *,
    least: int | None = None,
    most: int | None = None,
    cpus: float = 1,
    gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    checkpoint: str | None = None,
    options: Sequence[str] = (),
    timeout: float = 600.0,
) -> Result | None:
    """Train on a Ray cluster: as ``hvdrecover run`` does, but in slots that Ray gives, without ssh.

    Args:
        train: called in each training process; it does what a training script does.
        processes: how many of them to start with.
        least: with how many to continue when some are lost (default: all; the job waits for slots).
        most: how many there may be, as nodes come; a node that was lost is replaced in any case.
        cpus: of each process.
        gpus: of each process.
        resources: other resources of each process, by Ray's names.
        checkpoint: checkpoint root of states that name none.
        options: more options of ``hvdrecover run``.
        timeout: seconds to wait for the first slots.

    Returns:
        What ``train`` has returned on rank 0; None if the run was finished by an earlier call.

    Raises:
        ConfigError: this process is not on a node of the cluster, or Ray is not installed.
        LaunchError: the job could not be started or has ended without an error of ``train``.
        SystemExit: the job has left after a preemption, with code 75; call it again to resume.
        Exception: that of ``train`` by which the job has ended; its cause holds the traceback.

    Examples:
        >>> import hvdrecover.ray
        >>> hvdrecover.ray.run(train, 4, gpus=1, checkpoint="s3://bucket/run-1")  # doctest: +SKIP
    """
    import cloudpickle  # Horovod needs it, so it is there

    pickled = cloudpickle.dumps(train)
    bounds = {"--min-np": least, "--max-np": most, "--checkpoint": checkpoint}
    words = [word for name, value in bounds.items() if value is not None for word in (name, str(value))]
    with slots(processes, most=most, cpus=cpus, gpus=gpus, resources=resources, timeout=timeout) as held:
        exchange = Exchange(connected(), held.key.encode(), pickled)
        try:
            command = [sys.executable, "-m", "hvdrecover", "run", "-np", str(processes), *words]
            command += [*held.options, *options, "--", sys.executable, "-m", _FUNCTION]
            code = _done(command, {**held.environ, "HVDRECOVER_EXCHANGE": exchange.place})
        finally:
            exchange.close()
    if code == 0:
        result: Result | None = exchange.result()
        return result
    if code == PREEMPTED:
        raise SystemExit(PREEMPTED)
    problem = f"has ended with exit code {code}; what it has printed says why"
    raise exchange.error() or LaunchError("hvdrecover run", problem)


def connected() -> str:
    """Connect to Ray, if that was not done, and return this node's address.

    Raises:
        ConfigError: this process is not on a node of the cluster, or Ray is not installed.
    """
    try:
        import ray
        from ray.util import client
    except ImportError as error:
        raise ConfigError("ray", f"can't be imported ({error}); pip install 'hvdrecover[ray]'") from error
    if client.ray.is_connected():
        problem = "this process is a client outside of the cluster, which training processes can't reach"
        raise ConfigError("ray", f"{problem}; start the script on a node: ray job submit -- python train.py")
    if not ray.is_initialized():
        ray.init()
    return str(ray.util.get_node_ip_address())


def interface() -> str:
    """The network interface of this node's address.

    Raises:
        LaunchError: there is none.
    """
    from hvdrecover.launch.horovodrun import interface_of

    address = connected()
    if not (found := interface_of(address)):
        raise LaunchError(address, "no network interface has this address, which Ray has of this node")
    return found[0]


def _done(command: Sequence[str], environ: Mapping[str, Any]) -> int:
    """Run the supervisor, and return its exit code; it ends at once when this process is interrupted."""
    child = children.start(command, environ, stdin=subprocess.DEVNULL)
    try:
        with _hearing_of_preemptions(child):
            return children.exit_code(child.wait())
    except BaseException:
        child.send_signal(signal.SIGINT)
        child.ends(_INTERRUPTED)
        raise
    finally:
        child.kill_group()
        child.ends()


@contextmanager
def _hearing_of_preemptions(child: children.Child) -> Iterator[None]:
    """Hand SIGTERM on to the supervisor, if this is the main thread, which alone can hear it.

    Ray's own handler would have the process end by SIGABRT, which looks like a crash.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
