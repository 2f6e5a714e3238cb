"""``hvdrecover run --preflight``: the job's hosts are looked at, and those that are broken left out."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from hvdrecover.cli import discovering
from hvdrecover.cli.discovering import Request
from hvdrecover.clock import Clock
from hvdrecover.config import Config
from hvdrecover.doctor.examination import Settings, examine
from hvdrecover.doctor.findings import Finding, Selection, select
from hvdrecover.errors import ConfigError
from hvdrecover.events import Events, recorded
from hvdrecover.launch import horovodrun
from hvdrecover.launch.horovodrun import Options

logger = logging.getLogger(__name__)

_PER_HOST = "--slots-per-host"  # horovodrun's, of hosts whose script tells none


def selected(options: Options, request: Request | None, read: Config, clock: Clock) -> Options:
    """Return the options of a job that starts on those of its hosts that are well.

    Args:
        options: the user's.
        request: how hosts are discovered, or None.
        read: this process's settings.
        clock: where times come from.

    Raises:
        LaunchError: too few hosts are well, or what is wrong is not the fault of single hosts.
        ConfigError: there are no hosts to look at.
        DiscoveryError: there is no good answer to which hosts there are.
    """
    from hvdrecover.cli import printer

    hosts = _hosts(options, request)
    least = options.processes if options.mpi else options.least or options.processes
    settings = Settings(
        hosts=hosts,
        processes=sum(hosts.values()),
        interfaces=options.interfaces,
        ssh_port=options.ssh_port,
        identity=options.identity,
    )
    began = clock.monotonic()
    with printer.checking() as notify:
        findings = examine(settings, clock, notify, hosts_only=True).findings
    warnings = [str(finding) for finding in findings if finding.outcome == "warning"]
    selection = select(hosts, findings, least)
    if selection.excluded:
        options = _without(options, selection, request)
    events, seconds = recorded(read, clock), clock.monotonic() - began
    _report(selection, warnings, options.processes, events, seconds)
    return options


def _report(
    selection: Selection, warnings: Sequence[str], processes: int, events: Events, seconds: float
) -> None:
    for line in warnings:
        logger.warning("%s", line)
    for finding, names in _grouped(selection.excluded):
        logger.warning("%s left out: %s", ", ".join(names), finding)
    used, excluded = selection.hosts, selection.excluded
    what = f"{len(used)} of {len(used) + len(excluded)} hosts are used, for {processes} processes"
    events.rank = -1
    events.emit(
        "preflight",
        f"{what}; looked at them for {seconds:.1f} s",
        used=list(used),
        excluded={host: str(finding) for host, finding in excluded.items()},
        warnings=list(warnings),
        seconds=seconds,
    )


def _hosts(options: Options, request: Request | None) -> dict[str, int]:
    """Return the hosts that there are now, and their slots."""
    if request is not None:
        found = {host.name: host.slots for host in discovering.find(request)}
    elif options.discovery is not None:
        slots = _slots(options.others)
        found = {host: told or slots for host, told in horovodrun.discovered(options.discovery).items()}
    else:
        found = horovodrun.hosts(options)
    if not found:
        raise ConfigError(
            "--preflight", "there are no hosts yet; start the job when there are, or without it"
        )
    return found


def _slots(others: Sequence[str]) -> int:
    """Return how many slots a host has whose discovery script tells none."""
    for word, following in zip_longest(others, others[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        told = value if equals else following
        if name == _PER_HOST and told.isdigit():
            return int(told)
    return 1


def _without(options: Options, selection: Selection, request: Request | None) -> Options:
    """Return the options of the job without the hosts that are left out, now and later."""
    options = replace(options, processes=min(options.processes, sum(selection.hosts.values())))
    if options.discovery is None:
        hosts = ",".join(f"{host}:{slots}" for host, slots in selection.hosts.items())
        return replace(options, hosts=hosts, hostfile=None)
    words = [word for host in selection.excluded for word in ("--exclude", glob.escape(host))]
    if request is None:
        own = ["--no-ssh-check", "--slots", str(_slots(options.others))]
        request = Request("command", [*own, "sh", "-c", options.discovery])
    return replace(options, discovery=discovering.script(Request(request.source, [*words, *request.words])))


def _grouped(excluded: Mapping[str, Finding]) -> Iterable[tuple[Finding, list[str]]]:
    """Return each thing that is wrong, with the hosts that are left out for it."""
    findings = list({id(finding): finding for finding in excluded.values()}.values())
    return [(each, [host for host, its in excluded.items() if its is each]) for each in findings]
