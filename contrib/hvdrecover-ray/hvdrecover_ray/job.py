"""Jobs on a Ray cluster: `run` trains a function, `slots` holds slots for a command."""

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
from typing import TypeVar

from hvdrecover.config import PREEMPTED
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.launch import processes as children
from hvdrecover.launch.horovodrun import interface_of
from hvdrecover_ray.function_server import DRIVER, FunctionServer
from hvdrecover_ray.slot_actor import python_path
from hvdrecover_ray.slot_pool import SlotPool

_TRAINING_PROCESS = "hvdrecover_ray.training_process"
_INTERRUPT_SECONDS = 60.0  # for a job to end after Ctrl-C

Result = TypeVar("Result")


@dataclass(frozen=True)
class Slots:
    """Slots of a Ray cluster, for ``hvdrecover run`` or ``drill``.

    Attributes:
        options: options of the command, which say where it finds hosts.
        environ: environment of the command, which says how it starts processes there.
        key: secret that protects the slots.
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
    """Hold slots of a Ray cluster in actors. The processes of a job start there, without ssh.

    Args:
        processes: number of slots. Ray gives all of them at once, or waits.
        most: largest number of slots. More slots are taken as soon as there is room.
        cpus: CPUs of each slot.
        gpus: GPUs of each slot.
        resources: other resources of each slot, by Ray's names.
        timeout: seconds to wait for the slots.

    Raises:
        ConfigError: this process does not run on a node of the cluster.
        LaunchError: not enough slots started in time.

    Examples:
        >>> with hvdrecover_ray.slots(4) as held:  # doctest: +SKIP
        ...     command = ["hvdrecover", "run", "-np", "4", *held.options, "--", "python", "train.py"]
        ...     subprocess.run(command, env=held.environ)
    """
    address = connect_to_ray()
    interfaces = interface_of(address)
    if not interfaces:
        raise LaunchError(address, "no network interface has this address, which Ray reports for this node")
    wanted = {"CPU": cpus, "GPU": gpus, **(resources or {})}
    amounts = {name: float(amount) for name, amount in wanted.items() if amount}
    folder = Path(tempfile.mkdtemp(prefix="hvdrecover-ray-"))  # only its owner can read it
    try:
        pool = SlotPool(processes, max(processes, most or 0), amounts, timeout, folder)
        try:
            cache, hosts = os.fspath(folder / "cache"), os.fspath(pool.host_file)
            discovery = shlex.join(["file", "--no-ssh-check", "--cache", cache, hosts])
            added = {
                "HVDRECOVER_REMOTE_SHELL": shlex.join(["ray", os.fspath(pool.slots_file)]),
                "PYTHONPATH": python_path(),
            }
            options = ("--network-interface", interfaces[0], "--discover", discovery)
            yield Slots(options, {**os.environ, **added}, pool.key)
        finally:
            pool.close()
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
    """Train on a Ray cluster like ``hvdrecover run``, but in slots of the cluster and without ssh.

    Args:
        train: called in each training process. It does what a training script does.
        processes: number of processes at the start.
        least: number of processes that continue after a loss (default: all; the job waits for slots).
        most: largest number of processes, as nodes come. A lost node is replaced in any case.
        cpus: CPUs of each process.
        gpus: GPUs of each process.
        resources: other resources of each process, by Ray's names.
        checkpoint: checkpoint root of states that name none.
        options: more options of ``hvdrecover run``.
        timeout: seconds to wait for the first slots.

    Returns:
        What ``train`` returned on rank 0; None if an earlier call finished the run.

    Raises:
        ConfigError: this process does not run on a node of the cluster.
        LaunchError: the job did not start, or ended without an error of ``train``.
        SystemExit: the job left after a preemption, with code 75. Call `run` again to resume.
        Exception: the error of ``train`` that ended the job. Its cause holds the traceback.

    Examples:
        >>> import hvdrecover_ray
        >>> hvdrecover_ray.run(train, 4, gpus=1, checkpoint="s3://bucket/run-1")  # doctest: +SKIP
    """
    import cloudpickle

    pickled = cloudpickle.dumps(train)
    bounds = {"--min-np": least, "--max-np": most, "--checkpoint": checkpoint}
    words = [word for name, value in bounds.items() if value is not None for word in (name, str(value))]
    with slots(processes, most=most, cpus=cpus, gpus=gpus, resources=resources, timeout=timeout) as held:
        server = FunctionServer(connect_to_ray(), held.key, pickled)
        try:
            command = [sys.executable, "-m", "hvdrecover", "run", "-np", str(processes), *words]
            command += [*held.options, *options, "--", sys.executable, "-m", _TRAINING_PROCESS]
            code = _supervise(command, {**held.environ, DRIVER: server.endpoint})
        finally:
            server.close()
    if code == 0:
        result: Result | None = server.result()
        return result
    if code == PREEMPTED:
        raise SystemExit(PREEMPTED)
    problem = f"ended with exit code {code}; its output says why"
    raise server.error() or LaunchError("hvdrecover run", problem)


def connect_to_ray() -> str:
    """Connect to Ray, unless this process is connected, and return the address of this node.

    Raises:
        ConfigError: this process does not run on a node of the cluster.
    """
    import ray
    from ray.util import client

    if client.ray.is_connected():
        problem = "training processes cannot reach a Ray client outside of the cluster"
        raise ConfigError("ray", f"{problem}. Start the script on a node: ray job submit -- python train.py")
    if not ray.is_initialized():
        ray.init()
    return str(ray.util.get_node_ip_address())


def _supervise(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the supervisor, and return its exit code. An exception here interrupts the supervisor."""
    child = children.start(command, environ, stdin=subprocess.DEVNULL)
    try:
        with _forward_preemption(child):
            return children.exit_code(child.wait())
    except BaseException:
        child.send_signal(signal.SIGINT)
        child.ends(_INTERRUPT_SECONDS)
        raise
    finally:
        child.kill_group()
        child.ends()


@contextmanager
def _forward_preemption(child: children.Child) -> Iterator[None]:
    """Send SIGTERM on to the supervisor. Only the main thread can set a handler.

    Ray's own handler would end this process by SIGABRT, which looks like a crash.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
