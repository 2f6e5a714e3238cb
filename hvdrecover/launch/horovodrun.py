"""``horovodrun`` with what recovery needs: its command line, its settings, and changes to Horovod's code."""

from __future__ import annotations

import codecs
import functools
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from hvdrecover import config
from hvdrecover.discovery import lists
from hvdrecover.discovery.sources import Host, output_of
from hvdrecover.errors import ConfigError, DiscoveryError, HostListError, LaunchError
from hvdrecover.events import recorded, show_on_terminal
from hvdrecover.launch import ends, output, processes, ssh, waits
from hvdrecover.machine import is_local, source_towards

COLLECTIVE_SECONDS = 10  # seconds after which ranks give up a rank that does not answer
FOREIGN = (
    "this Horovod was not built by `hvdrecover install-horovod`: ranks that wait for one that hangs may have "
    "to be killed with it, and ranks may abort when one of them is lost in a rendezvous. Then the job "
    "starts again from the newest commit in its hosts' memory or at its checkpoint root"
)
_COOLDOWN = ("10", "600")  # least and most seconds before a failed host is used again
_TIMEOUT = 300.0  # for Horovod's stall check, without a fixed hang timeout
_WORKERS_FAILED = "one or more processes exited with non-zero status"  # their guardians have reported why
_NOT_BUILT = "has not been built"  # Gloo or MPI
_STOPS = re.compile(r"(failure|blacklisted slots) count == \d+ -> stop running")
_WORKER_FAILED = re.compile(r"Process \d+ exit with status code (?!255\b)")  # 255: ssh, not a guardian


@dataclass(frozen=True)
class Options:
    """The options of ``horovodrun`` that ``hvdrecover run`` knows; all others are handed on."""

    processes: int  # number of processes to start with (``-np``)
    least: int | None = None  # number that suffices (``--min-np``); None for all of them, as in Horovod
    most: int | None = None  # number of processes that may be used (``--max-np``)
    hosts: str | None = None  # as ``host:slots,host:slots`` (``-H``)
    hostfile: Path | None = None  # a file of lines ``host slots=N``
    discovery: str | None = None  # command that prints a line ``host:slots`` for each host
    interfaces: tuple[str, ...] = ()  # network interfaces to use
    ssh_port: int | None = None  # of all hosts
    identity: str | None = None  # ssh's private key
    mpi: bool = False  # whether the job is started by ``mpirun``; it is not elastic then
    others: tuple[str, ...] = ()  # arguments to pass on unchanged


def arguments(options: Options, command: Sequence[str]) -> list[str]:
    """Return the arguments of ``horovodrun``; raises what `hosts` and `ask` raise."""
    given: dict[str, Any] = {"-np": options.processes, "-p": options.ssh_port, "-i": options.identity}
    interfaces, others = options.interfaces, options.others
    if options.mpi:
        given |= {"-H": options.hosts, "--hostfile": options.hostfile if options.hosts is None else None}
        others = ("--mpi", *others)
    else:
        if options.discovery:
            # Also if an interface is given: unknown names must fail now.
            discovery, named = options.discovery, _discovered(options.discovery)
        else:  # with a discovery command, Horovod takes a lost host back
            slots = hosts(options)
            text = "".join(f"{host}:{number}\\n" for host, number in slots.items())
            discovery, named = f"printf {shlex.quote(text)}", list(slots)
        interfaces = interfaces or _only_interface(named, grows=options.discovery is not None)
        given |= {"--min-np": options.least or options.processes, "--max-np": options.most}
        given["--host-discovery-script"] = discovery
        if "--blacklist-cooldown-range" not in others:
            others = ("--blacklist-cooldown-range", *_COOLDOWN, *others)
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    for interface in interfaces:
        words += ["--network-interfaces", interface]
    return [*words, *others, *command]


def settings(timeout: float | None, environ: Mapping[str, str], *, ours: bool) -> dict[str, str]:
    """Horovod's settings that recovery needs, where the user has not set them."""
    values = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": max(1, min(COLLECTIVE_SECONDS, int((timeout or _TIMEOUT) / 2))),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": max(1, int((timeout or _TIMEOUT) / 8)),
    }
    if not ours:
        values["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = waits.stall_seconds(timeout or _TIMEOUT)
    return {name: str(value) for name, value in values.items() if name not in environ}


def is_ours() -> bool:
    """Return whether the installed Horovod was built by ``hvdrecover install-horovod``."""
    try:
        return "hvdrecover" in metadata.version("horovod")
    except metadata.PackageNotFoundError:
        remedy = "is not installed; `hvdrecover install-horovod` builds and installs it"
        raise LaunchError("horovod", remedy) from None


def hosts(options: Options) -> dict[str, int]:
    """Return the named hosts with their slots, or this host if none is named; raises `DiscoveryError`."""
    if options.hosts is not None:
        found = lists.static({}, 0.0, hosts=options.hosts)
    elif options.hostfile is not None:
        found = lists.file({}, 0.0, path=str(options.hostfile))
    else:
        return {"localhost": options.processes}
    named = {host.name: host.slots or 1 for host in found}
    if not named:
        raise ConfigError("-H" if options.hosts is not None else "--hostfile", "it names no host")
    return named


def ask(command: str) -> list[Host]:
    """Run a discovery command in a shell, and return the hosts; raises `DiscoveryError` if it fails."""
    printed = output_of(("/bin/sh", "-c", command), config.environment(), waits.DISCOVERY)
    lines = dict.fromkeys(printed.decode(errors="replace").splitlines())  # some scripts print a host twice
    # Horovod puts host names into shell commands, so lines that are no host names raise `HostListError`.
    return lists.parse("\n".join(lines), "--host-discovery-script")


def _discovered(command: str) -> list[str]:
    """Return the names of the hosts that a discovery command prints now; none if it fails."""
    try:
        return [host.name for host in ask(command)]
    except HostListError:
        raise
    except DiscoveryError:
        return []


def _only_interface(named: Sequence[str], *, grows: bool) -> tuple[str, ...]:
    """Return the interface that reaches the only host: Horovod's search would wait for a second one."""
    if len(set(named)) != 1:
        return ()
    local = is_local(named[0])  # perhaps under another name, as a Slurm node
    if local and not grows:
        return ("lo",)
    # Hosts that come later connect to this one at the address of its name.
    return interface_of(source_towards(named[0])) or (("lo",) if local else ())


def interface_of(address: str) -> tuple[str, ...]:
    """Return the interface of this host with an address; empty if no interface has it."""
    import psutil  # installed with Horovod

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return (name,)
    return ()


# -- the process that runs horovodrun -----------------------------------------------------------------


def main() -> None:
    """Run ``horovodrun`` with this process's arguments, of which the first says what starts workers."""
    processes.die_with_parent()
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # about semaphores left after a kill
    read = config.read()
    how, sys.argv[:2] = sys.argv[1], ["horovodrun"]
    if how == "gloo":  # mpirun sends the environment through its own connections
        _hide_environment()
        start_anew(importlib.import_module("horovod.runner.elastic.driver").ElasticDriver)
        _keep_interfaces(importlib.import_module("horovod.runner.driver.driver_service"))
        ask_by_shell(importlib.import_module("horovod.runner.elastic.discovery").HostDiscoveryScript)
    # Batch systems send SIGTERM to all processes of a host at once. A horovodrun that heeds it ends the
    # workers before they can leave at their next commit.
    signal.signal(signal.SIGTERM, _left_to_supervisor)
    _leave_to_guardians()
    launch = importlib.import_module("horovod.runner.launch")
    events = recorded(read, seconds=waits.DISK)

    def report(name: str, problem: str) -> None:
        message = f"{name} can't be written: {problem}. The job continues; its output may be lost"
        events.emit("output", message, level=logging.WARNING, stream=name, problem=problem)

    _forward_always(report)
    # If this process stopped reading because its own output is blocked, every rank would block in its next
    # `print`, and be killed as hanging.
    with output.unblocked("stdout", "stderr", report=report):
        show_on_terminal(read)
        try:
            launch.run_commandline()
        except Exception as error:  # uncaught, it would print twenty lines of Horovod's own code
            summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
            if _NOT_BUILT in summary:
                remedy = "`hvdrecover install-horovod` builds it; a Horovod without Gloo needs --mpi"
                sys.stderr.write(f"horovodrun: {summary}\n{remedy}\n")
                sys.exit(ends.REFUSED)
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


def _keep_interfaces(driver_service: Any) -> None:
    """Patch Horovod to use the interfaces that were named also while all hosts are this one."""
    # Horovod 0.28.1 allows only the loopback interface then, and other hosts that come later can't connect.
    found = driver_service.get_local_interfaces
    driver_service.get_local_interfaces = lambda settings: settings.nics or found(settings)


def ask_by_shell(script: Any) -> None:
    """Patch Horovod's discovery script: it runs the command in a shell, without a Python process."""

    # Horovod 0.28.1 starts two Python processes for each question, every second: 70 ms of processor time.
    def printed(self: Any) -> str:
        command: str = self._discovery_script
        try:
            hosts = ask(command)
        except DiscoveryError as error:  # Horovod reports a `RuntimeError`, and asks again
            raise RuntimeError(f"the host discovery script `{command}` has failed: {error}") from error
        return "\n".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)

    script._execute_discovery_script = printed


def start_anew(driver: Any) -> None:
    """Patch Horovod's driver: when a lost host comes back, its slots are started again."""
    # Horovod 0.28.1 counts all slots of its last assignment as running. If too few are left for the job,
    # there is no new assignment until a lost host is back. Nothing starts on it then, and all wait forever.
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
