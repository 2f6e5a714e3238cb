"""The command line and the settings of a ``horovodrun`` that can recover."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdrecover import config
from hvdrecover.discovery import lists
from hvdrecover.discovery.sources import Host, output_of
from hvdrecover.errors import ConfigError, DiscoveryError, HostListError, LaunchError
from hvdrecover.launch import hangs, waits
from hvdrecover.machine import is_local, source_towards

COLLECTIVE_SECONDS = 10  # seconds after which ranks give up a rank that does not answer
FOREIGN = (
    "this Horovod was not built by `hvdrecover install-horovod`: ranks that wait for one that hangs may have "
    "to be killed with it, and ranks may abort when one of them is lost in a rendezvous. Then the job "
    "starts again from the newest commit in its hosts' memory or at its checkpoint root"
)
_COOLDOWN = ("10", "600")  # least and most seconds before a failed host is used again
_TIMEOUT = 300.0  # for Horovod's stall check, without a fixed hang timeout


@dataclass(frozen=True)
class Options:
    """The options of ``horovodrun`` that ``hvdrecover run`` knows; all others are handed on."""

    processes: int  # number of processes to start with (``-np``)
    # number of processes that suffices (``--min-np``); None for all of them, as in Horovod
    least: int | None = None
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
    """Return the arguments of ``horovodrun``. Raises what `hosts` and `ask` raise."""
    words = ["-np", str(options.processes)]
    for name, value in (("-p", options.ssh_port), ("-i", options.identity)):
        words += [name, str(value)] if value is not None else []
    interfaces = options.interfaces
    if options.mpi:
        words += ["--mpi"]
        if options.hosts is not None:
            words += ["-H", options.hosts]
        elif options.hostfile is not None:
            words += ["--hostfile", str(options.hostfile)]
    else:
        if options.discovery:
            # Also if an interface is given: unknown names must fail now.
            discovery, named = options.discovery, _discovered(options.discovery)
        else:
            slots = hosts(options)
            discovery, named = _listing(slots), list(slots)
        interfaces = interfaces or _only_interface(named)
        words += ["--min-np", str(options.least or options.processes), "--host-discovery-script", discovery]
        words += ["--max-np", str(options.most)] if options.most is not None else []
        if "--blacklist-cooldown-range" not in options.others:
            words += ["--blacklist-cooldown-range", *_COOLDOWN]
    for interface in interfaces:
        words += ["--network-interfaces", interface]
    return [*words, *options.others, *command]


def settings(timeout: float | None, environ: Mapping[str, str], *, ours: bool) -> dict[str, str]:
    """Horovod's settings that recovery needs, where the user has not set them."""
    values = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": hangs.collective_seconds(timeout, COLLECTIVE_SECONDS),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": hangs.check_seconds(timeout or _TIMEOUT),
    }
    if not ours:
        values["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = hangs.stall_seconds(timeout or _TIMEOUT)
    return {name: str(value) for name, value in values.items() if name not in environ}


def is_ours() -> bool:
    """Return whether the installed Horovod was built by ``hvdrecover install-horovod``."""
    try:
        return "hvdrecover" in metadata.version("horovod")
    except metadata.PackageNotFoundError:
        remedy = "is not installed; `hvdrecover install-horovod` builds and installs it"
        raise LaunchError("horovod", remedy) from None


def hosts(options: Options) -> dict[str, int]:
    """Return the named hosts with their slots, or this host if none is named.

    Raises `DiscoveryError` if the list cannot be read, `ConfigError` if it is empty.
    """
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


def _listing(named: Mapping[str, int]) -> str:
    """Return a discovery command for a fixed list of hosts: with one, Horovod takes a lost host back."""
    text = "".join(f"{host}:{slots}\\n" for host, slots in named.items())
    return f"printf {shlex.quote(text)}"


def ask(command: str) -> list[Host]:
    """Run a discovery command in a shell; return the hosts. Raises `DiscoveryError` if it fails.

    Horovod puts host names into shell commands, so lines that are no host names raise `HostListError`.
    """
    printed = output_of(("/bin/sh", "-c", command), config.environment(), waits.DISCOVERY)
    lines = dict.fromkeys(printed.decode(errors="replace").splitlines())  # some scripts print a host twice
    return lists.parse("\n".join(lines), "--host-discovery-script")


def _discovered(command: str) -> list[str]:
    """Return the names of the hosts that a discovery command prints now; none if it fails."""
    try:
        return [host.name for host in ask(command)]
    except HostListError:
        raise
    except DiscoveryError:
        return []


def _only_interface(named: Sequence[str]) -> tuple[str, ...]:
    if len(set(named)) != 1:
        return ()
    if is_local(named[0]):  # perhaps under another name, as a Slurm node
        return ("lo",)  # Horovod accepts no other interface then
    return interface_of(source_towards(named[0]))


def interface_of(address: str) -> tuple[str, ...]:
    """Return the interface of this host with an address; empty if no interface has it."""
    import psutil  # installed with Horovod

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return (name,)
    return ()
