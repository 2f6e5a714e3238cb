"""The commands that start and watch over jobs; see ``docs/launching.md``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config, events
from hvdrecover.cli import options, unknown
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError, DiscoveryError

if TYPE_CHECKING:
    from hvdrecover.cli.discovering import Request
    from hvdrecover.launch.horovodrun import Options


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    job = commands.add_parser(
        "run",
        usage="hvdrecover run -np N [horovodrun's options] [options] python train.py ...",
        help="start a job by horovodrun, and keep it going",
        description="Start a job by horovodrun, elastic unless --mpi is given, and keep it going: processes "
        "that die or hang are restarted in place, and when Horovod gives up, the whole job is started again "
        "from its newest durable commit. Options that are not listed here are handed on to horovodrun.",
        epilog=options.DURATIONS,
        allow_abbrev=False,
    )
    _add_job(job)
    _add_guardian(job)
    job.add_argument("--checkpoint", metavar="URL", help="checkpoint root (default: HVDRECOVER_CHECKPOINT)")
    job.add_argument(
        "--preflight",
        action="store_true",
        help="look at the hosts before the job starts, and leave out those that are broken (docs/doctor.md)",
    )
    job.add_argument(
        "--reopen",
        action="store_true",
        help="continue a run that was finished, for more epochs say (default: it returns at once)",
    )
    job.add_argument(
        "--max-restarts",
        type=options.number,
        default=10,
        metavar="N",
        help="restarts of the whole job in a row that bring no progress, until it is given up (default: 10)",
    )
    job.add_argument(
        "-cb", "--check-build", action=unknown.ByHorovodrun, help="show how Horovod was built, and exit"
    )
    job.set_defaults(run=run, refuse=job.error)

    worker = commands.add_parser(  # without help, so it is not listed: `hvdrecover run` starts it
        "worker",
        usage="horovodrun ... hvdrecover worker [options] -- python train.py ...",
        description="Start a training process and watch over it, as the guardian of one slot of a job.",
        epilog=options.DURATIONS,
        allow_abbrev=False,
    )
    _add_guardian(worker)
    worker.set_defaults(run=_worker, refuse=worker.error)


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("the job, as for horovodrun")
    options.add_processes(job)
    job.add_argument(
        "--min-np",
        "--min-num-proc",
        type=options.count,
        metavar="N",
        dest="least",
        help="resume with so few processes when hosts are lost (default: as -np; the job waits for hosts)",
    )
    job.add_argument(
        "--max-np",
        "--max-num-proc",
        type=options.count,
        metavar="N",
        dest="most",
        help="use no more than these, however many slots there are (default: all slots)",
    )
    hosts = add_hosts(job)
    hosts.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        dest="discovery",
        help="find hosts by a program that writes a line host:slots for each",
    )
    job.add_argument(  # horovodrun's own, which would be taken for -p with a port
        "-prefix-timestamp",
        action="append_const",
        const="-prefix-timestamp",
        dest="passed_on",
        default=[],
        help=argparse.SUPPRESS,
    )
    job.add_argument(
        "--mpi", action="store_true", help="start by mpirun; any lost process then ends the start"
    )


def add_hosts(job: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
    """Add what says where a job runs and how its hosts are reached; returns the group of what names hosts."""
    hosts = job.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts (default: this one)")
    hosts.add_argument(
        "-hostfile", "--hostfile", type=Path, metavar="FILE", help="a line host slots=N for each host"
    )
    hosts.add_argument(
        "--discover",
        metavar="SOURCE",
        help='find hosts as `hvdrecover discover SOURCE` does: slurm, or "file hosts --exclude gpu7"',
    )
    job.add_argument(
        "--network-interface",
        "--network-interfaces",
        action="append",
        metavar="NAME",
        dest="interfaces",
        default=[],
        help="of all hosts; can be given several times (default: found by Horovod)",
    )
    job.add_argument("-p", "--ssh-port", type=options.count, metavar="PORT", help="of all hosts")
    job.add_argument("-i", "--identity", "--ssh-identity-file", metavar="FILE", help="ssh's private key")
    return hosts


def _add_guardian(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hang-timeout",
        type=options.hang_timeout,
        metavar="DURATION",
        help="kill a process that makes no progress for so long (default: 5 times the longest that was "
        "seen, at least 5 minutes)",
    )
    parser.add_argument(
        "--startup-timeout",
        type=options.duration,
        default=3600.0,
        metavar="DURATION",
        help="how long processes may take from their start, or from a fault, until all ranks train (default: "
        "1h)",
    )
    parser.add_argument(
        "--grace",
        type=options.duration,
        default=30.0,
        metavar="DURATION",
        help="how long processes may take to leave after a preemption (default: 30s)",
    )
    parser.add_argument(
        "--no-standby", action="store_true", help="keep no process in readiness; a restart then takes seconds"
    )


def takes_command(argv: list[str]) -> bool:
    """Return whether the arguments are those of a command that takes a training command."""
    return argv[:1] in (["run"], ["worker"], ["drill"])


def split(argv: list[str], parsers: Mapping[str, argparse.ArgumentParser]) -> tuple[list[str], list[str]]:
    """Split words into our command and the training command, which ``--`` may separate.

    Args:
        argv: all of them.
        parsers: of our commands, by name.
    """
    if not takes_command(argv):
        return argv, []
    known = [parsers[argv[0]], *([parsers["run"]] if argv[0] == "drill" else [])]
    place = 1
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "--":
        place += 1 + unknown.values(argv[place], known)
    rest = argv[place:]
    return argv[:place], rest[1:] if rest[:1] == ["--"] else rest


def _worker(arguments: argparse.Namespace) -> int:
    from hvdrecover.launch import output
    from hvdrecover.launch.guardian import Settings, guard
    from hvdrecover.launch.hangs import Limits

    read = config.read()
    limits = Limits(arguments.hang_timeout, arguments.startup_timeout)
    settings = Settings(limits, arguments.grace, not arguments.no_standby)
    with output.unblocked("stderr"):
        events.show_on_terminal(read)
        return guard(arguments.command, settings, read)


def run(arguments: argparse.Namespace) -> int:
    """Start a job and keep it going."""
    from hvdrecover.launch import output

    with output.unblocked("stderr"):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from hvdrecover.launch import horovodrun, slurm
    from hvdrecover.launch.supervisor import Settings, Supervisor

    if (arguments.least or 1) > arguments.processes:
        arguments.refuse(f"--min-np {arguments.least} is more than -np {arguments.processes}")
    if (arguments.most or arguments.processes) < arguments.processes:
        arguments.refuse(f"--max-np {arguments.most} is less than -np {arguments.processes}")
    read = config.read()
    events.show_on_terminal(read)
    command: list[str] = arguments.command
    folder = read.events or events.new_run(SYSTEM_CLOCK).absolute()
    read = replace(read, events=folder)
    if not (ours := horovodrun.is_ours()):
        events.logger.warning(horovodrun.FOREIGN)
    environ = horovodrun.settings(arguments.hang_timeout, config.environment(), ours=ours)
    environ["HVDRECOVER_EVENTS"] = str(folder)
    if root := config.absolute(arguments.checkpoint or "") or read.checkpoint:
        environ["HVDRECOVER_CHECKPOINT"] = root
    if arguments.reopen:
        environ["HVDRECOVER_REOPEN"] = "1"
    options = _options(arguments)
    _check(arguments, options)
    if arguments.preflight:
        from hvdrecover.cli import preflighting

        options = preflighting.selected(options, discovery(arguments), read, SYSTEM_CLOCK)
    settings = Settings(
        options=options,
        worker=_guardian_command(arguments),
        environ=environ,
        folder=folder,
        max_restarts=arguments.max_restarts,
        grace=arguments.grace,
    )
    job = slurm.of_environment(config.environment(), SYSTEM_CLOCK)
    return Supervisor(command, settings, read, job).run()


def _check(arguments: argparse.Namespace, options: Options) -> None:
    """Refuse what no number of restarts would mend."""
    from hvdrecover.launch import horovodrun
    from hvdrecover.reporting import text

    if options.identity is not None and not Path(options.identity).expanduser().is_file():
        arguments.refuse(f"--identity: there is no file '{options.identity}'")
    if options.discovery is not None:
        return
    try:
        slots = sum(horovodrun.hosts(options).values())
    except (ConfigError, DiscoveryError) as error:
        arguments.refuse(str(error))
    if slots < options.processes and not options.mpi:
        count = text.counted(slots, "slot")
        arguments.refuse(f"the hosts have {count}, and -np asks for {options.processes}; write HOST:SLOTS")


def _options(arguments: argparse.Namespace) -> Options:
    from hvdrecover.launch.horovodrun import Options

    names = ("processes", "least", "most", "hosts", "hostfile", "discovery", "ssh_port", "identity", "mpi")
    known = {name: getattr(arguments, name) for name in names}
    if (request := discovery(arguments)) is not None:
        known.update(_discovered(request, mpi=arguments.mpi))
    others = (*arguments.passed_on, *arguments.others)
    return Options(**known, interfaces=tuple(arguments.interfaces), others=others)


def discovery(arguments: argparse.Namespace) -> Request | None:
    """Return what ``--discover`` asks for, with the options that follow from the job's; None without it."""
    from hvdrecover.cli import discovering

    if arguments.discover is None:
        return None
    words = [] if arguments.mpi else ["--allow-empty"]
    for option in ("most", "--max-np"), ("ssh_port", "--ssh-port"), ("identity", "--identity"):
        value = getattr(arguments, option[0])
        words += [option[1], str(value)] if value is not None else []
    return discovering.request(arguments.discover, words)


def _discovered(request: Request, *, mpi: bool) -> dict[str, str]:
    """Return how Horovod learns of hosts: from a script, or if their number can't change, from us, once."""
    from hvdrecover.cli import discovering

    hosts = discovering.find(request)  # now, so that people see what is wrong with the source
    if mpi:
        return {"hosts": ",".join(f"{host.name}:{host.slots}" for host in hosts)}
    return {"discovery": discovering.script(request)}


def _guardian_command(arguments: argparse.Namespace) -> tuple[str, ...]:
    words = [sys.executable, "-m", "hvdrecover", "worker", "--grace", f"{arguments.grace:g}"]
    words += ["--startup-timeout", f"{arguments.startup_timeout:g}"]
    if arguments.hang_timeout is not None:
        words += ["--hang-timeout", f"{arguments.hang_timeout:g}"]
    return (*words, *(["--no-standby"] if arguments.no_standby else []), "--")
