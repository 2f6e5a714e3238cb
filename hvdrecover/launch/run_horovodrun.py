"""``horovodrun`` without its stack traces; started by the supervisor.

When workers fail, ``horovodrun`` prints a line for each, raises an uncaught error, and prints
twenty lines of its own code. The guardian has reported the failure already.

SIGTERM is left to the supervisor and the guardians. Batch systems send it to all processes of a host at once,
and a ``horovodrun`` that heeds it ends the workers before they can leave at their next commit.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import logging
import os
import re
import signal
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

from hvdrecover import config
from hvdrecover.errors import DiscoveryError
from hvdrecover.events import Events, recorded, show_on_terminal
from hvdrecover.launch import horovodrun, output, processes, restarts, ssh, waits

_WORKERS_FAILED = "one or more processes exited with non-zero status"  # their guardians have reported why
_NOT_BUILT = "has not been built"  # Gloo or MPI
_STOPS = re.compile(r"(failure|blacklisted slots) count == \d+ -> stop running")
_WORKER_FAILED = re.compile(r"Process \d+ exit with status code (?!255\b)")  # 255: ssh, not a guardian


def main() -> None:
    """Run ``horovodrun`` with this process's arguments, of which the first says what starts workers."""
    processes.die_with_parent()
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # about semaphores left after a kill
    read = config.read()
    how, sys.argv[:2] = sys.argv[1], ["horovodrun"]
    if how == "gloo":  # mpirun sends the environment through its own connections
        _hide_environment()
        start_anew(importlib.import_module("horovod.runner.elastic.driver").ElasticDriver)
        scripts = importlib.import_module("horovod.runner.elastic.discovery")
        ask_by_shell(scripts.HostDiscoveryScript)
    signal.signal(signal.SIGTERM, _left_to_supervisor)
    _leave_to_guardians()
    launch = importlib.import_module("horovod.runner.launch")
    report = functools.partial(_report_output, recorded(read, seconds=waits.DISK))
    _forward_always(report)
    with output.unblocked("stdout", "stderr", report=report):
        show_on_terminal(read)
        try:
            launch.run_commandline()
        except Exception as error:
            summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
            if _NOT_BUILT in summary:
                remedy = "`hvdrecover install-horovod` builds it; a Horovod without Gloo needs --mpi"
                sys.stderr.write(f"horovodrun: {summary}\n{remedy}\n")
                sys.exit(restarts.REFUSED)
            sys.exit(1 if _WORKERS_FAILED in summary else f"horovodrun: {summary}")


def _forward_always(report: output.Report) -> None:
    """Patch Horovod to keep reading workers' output, whatever it contains and wherever it goes."""
    shell: Any = importlib.import_module("horovod.runner.common.util.safe_shell_exec")
    decoder = functools.partial(codecs.getincrementaldecoder("utf-8"), "replace")
    shell.codecs = SimpleNamespace(getincrementaldecoder=lambda _: decoder)
    gloo_run: Any = importlib.import_module("horovod.runner.gloo_run")
    gloo_run.open = lambda path, _: output.append(path, report)  # of --output-filename
    # Horovod prints ssh's error, and ends this process in a thread, which would leave the output unwritten.
    driver_service: Any = importlib.import_module("horovod.runner.driver.driver_service")
    driver_service.os = SimpleNamespace(**{**vars(os), "_exit": _write_and_exit})
    pad = gloo_run._pad_rank
    gloo_run._pad_rank = lambda rank, size: pad(rank, max(size, 2))  # it fails with a single rank


def _write_and_exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, output.Outlet):
            stream.drain()
    os._exit(code)


def _report_output(events: Events, name: str, problem: str) -> None:
    message = f"{name} can't be written: {problem}. The job continues; its output may be lost"
    events.emit("output", message, level=logging.WARNING, stream=name, problem=problem)


def _leave_to_guardians() -> None:
    """Patch Horovod: it neither prints guardians' exit codes nor ends guardians at SIGTERM."""
    gloo_run: Any = importlib.import_module("horovod.runner.gloo_run")

    def show(line: str) -> None:
        if not _WORKER_FAILED.match(line):
            sys.stdout.write(f"{line}\n")

    gloo_run.print = show  # hides the built-in function
    logging.getLogger().addFilter(lambda record: not _STOPS.match(record.getMessage()))
    register = gloo_run.register_shutdown_event

    def register_all_but_sigterm() -> Any:
        event = register()
        signal.signal(signal.SIGTERM, _left_to_supervisor)
        return event

    gloo_run.register_shutdown_event = register_all_but_sigterm


def _left_to_supervisor(number: int, frame: FrameType | None) -> None:
    """Do nothing. A handler, because child processes would inherit an ignored signal."""


def _hide_environment() -> None:
    """Patch Horovod to omit variables that workers inherit, or get through ssh."""
    env = importlib.import_module("horovod.runner.common.util.env")
    if not env.is_kubeflow_mpi():  # whose program in ssh's place takes no input
        names = "|".join(ssh.hidden(config.environment()))
        env.IGNORE_REGEXES.add(rf"(?:{names})\Z")


def ask_by_shell(script: Any) -> None:
    """Patch Horovod's class of discovery scripts: it runs the command in a shell, without a Python process.

    Horovod 0.28.1 starts two Python processes for each question, every second: 70 ms of processor time.
    """
    script._execute_discovery_script = _printed


def _printed(self: Any) -> str:
    """Return the hosts as Horovod expects them. It reports a `RuntimeError`, and asks again."""
    command: str = self._discovery_script
    try:
        hosts = horovodrun.ask(command)
    except DiscoveryError as error:
        raise RuntimeError(f"the host discovery script `{command}` has failed: {error}") from error
    return "\n".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)


def start_anew(driver: Any) -> None:
    """Patch Horovod's driver: when a lost host comes back, its slots are started again.

    Horovod 0.28.1 counts all slots of its last assignment as running. If too few are left for the job, there
    is no new assignment until a lost host is back. Nothing is started on it then, and all wait forever.
    """
    start, assign = driver._start_worker_process, driver._update_host_assignments

    def started(self: Any, slot: Any) -> None:
        given_up: threading.Event = self._host_manager.get_host_event(slot.hostname)
        vars(self).setdefault("_given_up", {})[slot.hostname, slot.local_rank] = given_up
        start(self, slot)

    def assigned(self: Any, hosts: Any) -> Any:
        given_up = vars(self).get("_given_up", {})
        lost = {place for place, event in given_up.items() if event.is_set()}
        kept = {
            host: [slot for slot in slots if (host, slot.local_rank) not in lost]
            for host, slots in self._host_assignments.items()
        }
        self._host_assignments = {host: slots for host, slots in kept.items() if slots}
        return assign(self, hosts)

    driver._start_worker_process, driver._update_host_assignments = started, assigned


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process of Horovod's between this one and a worker's shell, or its ssh
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which inherit it; guardians don't
