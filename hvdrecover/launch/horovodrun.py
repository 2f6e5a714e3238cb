"""The command line and the settings of a ``horovodrun`` that can recover."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdrecover import config
from hvdrecover.discovery.checks import is_local
from hvdrecover.discovery.hosts import Host, parse
from hvdrecover.discovery.sources import Source
from hvdrecover.discovery.sources.lists import File, Static
from hvdrecover.errors import ConfigError, DiscoveryError, LaunchError
from hvdrecover.launch import hangs, processes, waits
from hvdrecover.surroundings import source_towards

COLLECTIVE_SECONDS = 10  # after which ranks give up one that doesn't answer
FOREIGN = (
    "this Horovod was not built by `hvdrecover install-horovod`: ranks that wait for one that hangs may have "
    "to be killed with it, and ranks may abort when one of them is lost in a rendezvous. Then the job has to "
    "resume from its durable commit"
)
_COOLDOWN = ("10", "600")  # seconds for which a host that has failed is left alone
_TIMEOUT = 300.0  # for Horovod's own look-out, where there is no fixed limit for hangs


@dataclass(frozen=True)
class Options:
    """The options of ``horovodrun`` that ``hvdrecover run`` knows; all others are handed on.

    Attributes:
        processes: number of processes to start with (``-np``).
        least: number of processes that suffices (``--min-np``); None for all of them, as in Horovod.
        most: number of processes that may be used (``--max-np``).
        hosts: as ``host:slots,host:slots`` (``-H``).
        hostfile: a file of lines ``host slots=N``.
        discovery: command that prints a line ``host:slots`` for each host.
        interfaces: network interfaces to use.
        ssh_port: of all hosts.
        identity: ssh's private key.
        mpi: whether the job is started by ``mpirun``; it is not elastic then.
        others: what to hand on as it is.
    """

    processes: int
    least: int | None = None
    most: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    discovery: str | None = None
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    identity: str | None = None
    mpi: bool = False
    others: tuple[str, ...] = ()


def arguments(options: Options, command: Sequence[str]) -> list[str]:
    """The arguments of ``horovodrun``.

    Args:
        options: the user's.
        command: what each slot runs.

    Raises:
        ConfigError: no host is named.
        DiscoveryError: the hosts can't be found out.
    """
    words = ["-np", str(options.processes)]
    for name, value in (("-p", options.ssh_port), ("-i", options.identity)):
        words += [name, str(value)] if value is not None else []
    interfaces = options.interfaces
    if options.mpi:
        words += ["--mpi", *_static_hosts(options)]
    else:
        discovery = options.discovery or _listing(hosts(options))
        named = known(options)  # with any interface, so that wrong names are told now
        interfaces = interfaces or _only_interface(named)
        words += ["--min-np", str(options.least or options.processes), "--host-discovery-script", discovery]
        words += ["--max-np", str(options.most)] if options.most is not None else []
        if "--blacklist-cooldown-range" not in options.others:
            words += ["--blacklist-cooldown-range", *_COOLDOWN]
    for interface in interfaces:
        words += ["--network-interfaces", interface]
    return [*words, *options.others, *command]


def settings(timeout: float | None, environ: Mapping[str, str], *, ours: bool) -> dict[str, str]:
    """Horovod's settings that recovery needs, where the user has not set them.

    Args:
        timeout: the user's limit for hangs, or None.
        environ: the environment.
        ours: whether Horovod was built by hvdrecover: then ranks limit their waiting while they run.
    """
    values = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": hangs.collective_seconds(timeout, COLLECTIVE_SECONDS),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": hangs.check_seconds(timeout or _TIMEOUT),
    }
    if not ours:
        values["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = hangs.stall_seconds(timeout or _TIMEOUT)
    return {name: str(value) for name, value in values.items() if name not in environ}


def is_ours() -> bool:
    """Return whether the installed Horovod was built by ``hvdrecover install-horovod``.

    Raises:
        LaunchError: Horovod is not installed.
    """
    try:
        return "hvdrecover" in metadata.version("horovod")
    except metadata.PackageNotFoundError:
        remedy = "is not installed; `hvdrecover install-horovod` builds and installs it"
        raise LaunchError("horovod", remedy) from None


def hosts(options: Options) -> dict[str, int]:
    """The hosts that were named, and how many slots each has; this host, if none was.

    Raises:
        DiscoveryError: what names them can't be read.
        ConfigError: it names none.
    """
    source: Source
    if options.hosts is not None:
        source = Static(options.hosts)
    elif options.hostfile is not None:
        source = File(str(options.hostfile))
    else:
        return {"localhost": options.processes}
    named = {host.name: host.slots or 1 for host in source.hosts({}, 0.0)}
    if not named:
        raise ConfigError("-H" if options.hosts is not None else "--hostfile", "it names no host")
    return named


def known(options: Options) -> list[str]:
    """The names of the hosts that there are now; raises what `hosts` and `discovered` do."""
    return list(discovered(options.discovery) if options.discovery else hosts(options))


def _static_hosts(options: Options) -> list[str]:
    if options.hosts is not None:
        return ["-H", options.hosts]
    return ["--hostfile", str(options.hostfile)] if options.hostfile is not None else []


def _listing(named: Mapping[str, int]) -> str:
    """A discovery command for hosts that don't change; with one, Horovod takes a lost host back."""
    text = "".join(f"{host}:{slots}\\n" for host, slots in named.items())
    return f"printf {shlex.quote(text)}"


def ask(command: str, stderr: int | None = None) -> tuple[list[Host], int]:
    """Run a script's command in a shell, which dies with this process.

    Horovod puts the names of hosts into commands of a shell, so nothing else may come in their place.

    Args:
        command: what prints a line for each host.
        stderr: as for `subprocess.Popen`.

    Returns:
        The hosts, none of them if it has failed, and its exit code.

    Raises:
        DiscoveryError: it has not ended in time, or has printed what names no host.
    """
    child = processes.start(
        ["/bin/sh", "-c", command],
        config.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    try:
        printed, _ = child.communicate(timeout=waits.DISCOVERY)
    except subprocess.TimeoutExpired:
        problem = f"'{command}' has not ended in {waits.DISCOVERY:g} s"
        raise DiscoveryError("--host-discovery-script", problem) from None
    finally:
        child.kill_group()  # if it was not waited for: with all that the shell has started
        child.ends()
        assert child.stdout is not None
        child.stdout.close()
    if child.returncode != 0:
        return [], child.returncode
    lines = dict.fromkeys(printed.decode(errors="replace").splitlines())  # some say a host twice
    return parse("\n".join(lines), "--host-discovery-script"), 0


def discovered(command: str) -> dict[str, int | None]:
    """The hosts that a discovery command names now, with their slots if it tells; none if it can't yet.

    Raises:
        DiscoveryError: it has not ended in time, or has printed what names no host.
    """
    named, _ = ask(command, stderr=subprocess.DEVNULL)
    return {host.name: host.slots for host in named}


def _only_interface(named: Sequence[str]) -> tuple[str, ...]:
    """The interface for a job on one host, which Horovod can't find by comparing hosts."""
    if len(set(named)) != 1:
        return ()
    if is_local(named[0]):  # perhaps under a name of its own, as a node of Slurm has
        return ("lo",)  # Horovod takes no other interface then
    return interface_of(source_towards(named[0]))


def interface_of(address: str) -> tuple[str, ...]:
    """The interface of this host that has an address; none if there is none."""
    import psutil  # Horovod needs it, so it is there

    names = [
        name
        for name, each in psutil.net_if_addrs().items()
        if any(entry.address == address for entry in each)
    ]
    return tuple(names[:1])
