"""The commands ``doctor`` and ``drill``, and ``run --preflight``; see docs/doctor.md and docs/drill.md."""

from __future__ import annotations

import argparse
import glob
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from hvdrecover import config, events
from hvdrecover.cli import discovering, launching, options, printer
from hvdrecover.config import Config
from hvdrecover.doctor import examination
from hvdrecover.doctor.examination import Finding, Settings, select
from hvdrecover.drill import lab
from hvdrecover.drill.drill import Drill
from hvdrecover.drill.faults import FAULTS, RESIZING
from hvdrecover.drill.faults import find as find_faults
from hvdrecover.drill.run import Command
from hvdrecover.errors import ConfigError, DiscoveryError
from hvdrecover.events import recorded
from hvdrecover.launch import horovodrun
from hvdrecover.launch.horovodrun import Options
from hvdrecover.machine import SYSTEM_CLOCK
from hvdrecover.texts import printable

logger = logging.getLogger(__name__)

DRILLS = Path("hvdrecover-drills")  # takes the folders of drills by default
_HERE = 2  # ranks that the doctor examines, if no host is named
_OUTCOMES = ("failure", "warning", "ok", "skipped")


# -- doctor --------------------------------------------------------------------------------------------


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The checks concern versions, the build of Horovod, ssh and network between hosts, their clocks, the
    checkpoint root, and memory. Each failure comes with a remedy; exit 1 if there is one.
    """
    options.add_json(parser, "docs/doctor.md")
    job = parser.add_argument_group("the job, as for hvdrecover run")
    ranks = f"ranks (default: all slots of the named hosts; {_HERE}, if none is named)"
    job.add_argument("-np", "--num-proc", **options.PROCESSES, help=ranks)
    options.add_hosts(job)
    job.add_argument("--checkpoint", metavar="URL", help="checkpoint root (default: HVDRECOVER_CHECKPOINT)")
    size = "size of a commit, such as 500M or 2.5G; checks whether memory and disk space suffice"
    parser.add_argument("--state-size", type=options.nbytes, metavar="SIZE", help=size)


def run_doctor(arguments: argparse.Namespace) -> int:
    try:
        settings = _settings(arguments)
        ranks = settings.ranks()
    except (ConfigError, DiscoveryError) as error:
        arguments.refuse(str(error))
    findings = _examine(settings)
    ok = all(each.outcome != "failure" for each in findings)
    document = {"ok": ok, "ranks": ranks, "findings": findings}
    printer.put(document, _text(findings), as_json=arguments.json)
    return 0 if ok else 1


def _settings(arguments: argparse.Namespace) -> Settings:
    if arguments.discover is None:
        named = Options(arguments.processes or _HERE, hosts=arguments.hosts, hostfile=arguments.hostfile)
        hosts = horovodrun.hosts(named)
    else:  # with the hosts whose ssh servers do not answer: the doctor says so
        words = ["--no-ssh-check", *(["--identity", arguments.identity] if arguments.identity else [])]
        found = discovering.find(discovering.request(arguments.discover, words))
        hosts = {host.name: host.slots for host in found}
    if not hosts:
        raise ConfigError("--discover", f"'{arguments.discover}' names no host")
    return Settings(
        hosts=hosts,
        processes=arguments.processes or sum(hosts.values()),
        interfaces=tuple(arguments.interfaces),
        ssh_port=arguments.ssh_port,
        identity=arguments.identity,
        checkpoint=arguments.checkpoint or config.read().checkpoint,
        state=arguments.state_size,
    )


def _examine(settings: Settings, *, hosts_only: bool = False) -> list[Finding]:
    options.end_by_exception()
    with printer.console_for(sys.stderr).status("checking hosts and storage"):
        return examination.examine(settings, hosts_only=hosts_only)


def _text(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    rows: list[tuple[str, ...]] = []
    for finding in findings:
        rows.append((finding.check, finding.outcome, finding.what))
        if finding.remedy:
            rows.append(("", "", f"→ {finding.remedy}"))
    yield printer.table(("check", "outcome", "finding"), rows)
    yield ""
    counts = [(outcome, sum(each.outcome == outcome for each in findings)) for outcome in _OUTCOMES]
    yield ", ".join(f"{outcome}: {count}" for outcome, count in counts if count)


# -- run --preflight -----------------------------------------------------------------------------------


def preflight(job: Options, request: Sequence[str] | None, read: Config) -> Options:
    """Return the options of a job that starts on those of its hosts that pass the checks."""
    if job.discovery is not None and request is None:
        problem = "it leaves out no hosts of a --host-discovery-script; write --discover 'command SCRIPT'"
        raise ConfigError("--preflight", f"{problem} instead of the script")
    began = SYSTEM_CLOCK.monotonic()
    discovered = {each.name: each.slots for each in discovering.find(request)} if request else None
    hosts = discovered if discovered is not None else horovodrun.hosts(job)
    if not hosts:
        problem = "there are no hosts yet; start the job when there are, or without it"
        raise ConfigError("--preflight", problem)
    settings = Settings(hosts, sum(hosts.values()), job.interfaces, job.ssh_port, job.identity)
    findings = _examine(settings, hosts_only=True)
    least = job.processes if job.mpi else job.least or job.processes
    used, failures = select(hosts, findings, least)
    if failures:
        job = _without(job, used, failures, request)
    warnings = [str(finding) for finding in findings if finding.outcome == "warning"]
    excluded = {host: str(finding) for host, finding in failures.items()}
    for line in (*warnings, *(f"{host} left out: {reason}" for host, reason in excluded.items())):
        logger.warning("%s", line)
    seconds = SYSTEM_CLOCK.monotonic() - began
    took = f"for {job.processes} processes; looked at them for {seconds:.1f} s"
    facts: dict[str, Any] = {"used": list(used), "excluded": excluded, "warnings": warnings}
    message = f"{len(used)} of {len(hosts)} hosts are used, {took}"
    recorded(read, SYSTEM_CLOCK).emit("preflight", message, seconds=seconds, **facts)
    return job


def _without(
    job: Options, used: Mapping[str, int], excluded: Iterable[str], request: Sequence[str] | None
) -> Options:
    job = replace(job, processes=min(job.processes, sum(used.values())))
    if request is None or job.discovery is None:
        hosts = ",".join(f"{host}:{slots}" for host, slots in used.items())
        return replace(job, hosts=hosts, hostfile=None)
    excluding = [word for host in excluded for word in ("--exclude", glob.escape(host))]
    return replace(job, discovery=discovering.script([request[0], *excluding, *request[1:]]))


# -- drill ---------------------------------------------------------------------------------------------


def add_drill(parser: argparse.ArgumentParser) -> None:
    """The training script runs undisturbed, then with faults. The script and its checkpoint root are left as
    they are: all commits go to the drill's own folder. Options that are not listed here are those of
    `hvdrecover run`.
    """
    parser.usage = "hvdrecover drill -np N [options] [options of hvdrecover run] python train.py ..."
    parser.epilog = options.DURATIONS
    options.add_json(parser, "docs/drill.md")
    add = parser.add_argument
    add("-np", "--num-proc", **options.PROCESSES, required=True, help="processes to start with")
    hosts = (
        "run on N hosts of network namespaces on this machine, with a rank on each; those beyond -np are "
        "spare; a host can be cut off then (needs root; default: on this host)"
    )
    add("--lab", **options.COUNT, help=hosts)
    resize = (
        "change the number of ranks between 1 and -np: hosts leave and come, and ranks are killed; a script "
        "with virtual ranks must end with the same, bit by bit"
    )
    add("--resize", action="store_true", help=resize)
    add("--faults", metavar="NAME,...", help="which strike (default: all that can)")
    add("--seed", **options.NUMBER, default=0, help="of all that is random (default: 0)")
    add("--repeat", **options.COUNT, default=1, help="how often each strikes (default: 1)")
    end = "end the undisturbed run after this time, and the others at the same commit"
    add("--duration", **options.DURATION, help=f"{end} (default: when the script ends)")
    output = f"for all of the drill's files (default: below ./{DRILLS})"
    add("-o", "--output", type=Path, metavar="FOLDER", help=output)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    launching.take_options(parser, _options_of_a_job())


def _options_of_a_job() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hvdrecover drill", allow_abbrev=False, add_help=False)
    launching.add_run(parser)
    return parser


def run_drill(arguments: argparse.Namespace) -> int:
    # Wrong values end the drill before its first run, and -H or the like where the drill names the hosts.
    ours = ["--discover", "file"] if arguments.lab or arguments.resize else []
    parsed = _options_of_a_job().parse_args(["-np", "1", *ours, *arguments.others])
    launching.check_values(parsed.others)
    folder = (arguments.output or DRILLS / events.new_run(SYSTEM_CLOCK).name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--output", f"'{folder}' is a file, or a folder that is not empty; name a new one")
    events.show_on_terminal(config.read())
    options.end_by_exception()
    usual = RESIZING if arguments.resize else tuple(FAULTS)
    faults = find_faults(arguments.faults.split(",") if arguments.faults is not None else usual)
    ranks, hosts = arguments.processes, None
    command = Command(tuple(arguments.command), ranks, tuple(arguments.others), arguments.resize)
    with ExitStack() as stack:
        if arguments.lab is not None:
            if arguments.lab <= ranks:
                why = f"a rank is on each, and one more must be spare; write --lab {ranks + 1}"
                raise ConfigError("--lab", f"{arguments.lab} hosts are too few for -np {ranks}: {why}")
            if lacking := lab.lacks():
                raise ConfigError("--lab", lacking)
            hosts = stack.enter_context(lab.Lab(arguments.lab))
        drill = Drill(folder, command, arguments.duration, hosts)
        outcome = drill.run(faults, seed=arguments.seed, repeat=arguments.repeat)
    text, document = printable(outcome.text(), "\n"), printer.json_text(outcome)
    (folder / "verdict.json").write_text(document)
    (folder / "verdict.txt").write_text(text)
    sys.stdout.write(document if arguments.json else text)
    return 0 if outcome.recovers else 1
