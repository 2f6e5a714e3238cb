"""``hvdrecover doctor``: whether a job would find what it needs; see ``docs/doctor.md``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.cli import discovering, launching, options
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError, DiscoveryError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hvdrecover.doctor.examination import Settings
    from hvdrecover.doctor.findings import Finding

_HERE = 2  # ranks, if no host is named
_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}
_OUTCOMES = ("failure", "warning", "ok", "skipped")
_PLURALS = {"failure": "failures", "warning": "warnings"}


def add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    help = "check hosts, network, Horovod and storage before a job"
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help=help,
        description="Check what a job needs before it is started: versions, how Horovod was built, ssh and "
        "network between hosts, their clocks, the checkpoint root, and memory. "
        "Each failure comes with what to do about it; exit 1 if there is one.",
        allow_abbrev=False,
    )
    job = parser.add_argument_group("the job, as for hvdrecover run")
    job.add_argument(
        "-np",
        "--num-proc",
        type=options.count,
        metavar="N",
        dest="processes",
        help=f"ranks (default: all slots of the named hosts; {_HERE}, if none is named)",
    )
    launching.add_hosts(job)
    job.add_argument("--checkpoint", metavar="URL", help="checkpoint root (default: HVDRECOVER_CHECKPOINT)")
    parser.add_argument(
        "--state-size",
        type=options.nbytes,
        metavar="SIZE",
        help="size of what is committed, such as 500M or 2.5G, to judge memory and space by",
    )
    parser.add_argument("--json", action="store_true", help="write JSON (docs/doctor.md)")
    parser.set_defaults(run=_run, refuse=parser.error)


def _run(arguments: argparse.Namespace) -> int:
    from hvdrecover.cli import printer
    from hvdrecover.doctor.examination import examine

    try:
        settings = _settings(arguments)
    except (ConfigError, DiscoveryError) as error:
        arguments.refuse(str(error))
    with printer.checking() as notify:
        report = examine(settings, SYSTEM_CLOCK, notify)
    if arguments.json:
        sys.stdout.write(printer.dumps(report))
    else:
        printer.put(table(report.findings))
    return 0 if report.ok else 1


def _settings(arguments: argparse.Namespace) -> Settings:
    from hvdrecover.doctor.examination import Settings
    from hvdrecover.launch import horovodrun

    ranks = arguments.processes or _HERE
    if arguments.discover is not None:
        hosts = _discovered(arguments)
    else:
        named = horovodrun.Options(ranks, hosts=arguments.hosts, hostfile=arguments.hostfile)
        hosts = horovodrun.hosts(named)
    settings = Settings(
        hosts=hosts,
        processes=arguments.processes or sum(hosts.values()),
        interfaces=tuple(arguments.interfaces),
        ssh_port=arguments.ssh_port,
        identity=arguments.identity,
        checkpoint=arguments.checkpoint or config.read().checkpoint,
        state=arguments.state_size,
    )
    settings.ranks()
    return settings


def _discovered(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the hosts that a source names, those included whose ssh servers don't answer."""
    words = ["--no-ssh-check", *(["--identity", arguments.identity] if arguments.identity else [])]
    found = discovering.find(discovering.request(arguments.discover, words))
    if not found:
        raise ConfigError("--discover", f"'{arguments.discover}' names no host")
    return {host.name: host.slots for host in found}


def table(findings: Sequence[Finding]) -> RenderableType:
    """The findings for people."""
    from rich.console import Group
    from rich.text import Text

    from hvdrecover.cli.printer import grid, plain

    found = grid("check", "outcome", "what was found")
    for finding in findings:
        found.add_row(finding.check, Text(finding.outcome, _STYLES[finding.outcome]), plain(finding.what))
        if finding.remedy:
            found.add_row("", "", plain(("→ ", "bold"), finding.remedy))
    return Group(found, Text(), Text(_summary(findings)))


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter[str](finding.outcome for finding in findings)
    return ", ".join(
        f"{counts[outcome]} {_PLURALS.get(outcome, outcome) if counts[outcome] != 1 else outcome}"
        for outcome in _OUTCOMES
        if counts[outcome]
    )
