"""The commands that start and watch over jobs; see ``docs/launching.md``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hvdrecover import config, events
from hvdrecover.checkpoint import redact
from hvdrecover.cli import discovering, options
from hvdrecover.errors import ConfigError, DiscoveryError
from hvdrecover.launch import guardian, output
from hvdrecover.machine import SYSTEM_CLOCK

if TYPE_CHECKING:
    from hvdrecover.launch.horovodrun import Options


_OF_A_GUARDIAN = ("hang_timeout", "startup_timeout", "grace", "no_standby")


def add_run(parser: argparse.ArgumentParser) -> None:
    """A job is elastic unless --mpi is given. Processes that die or hang are restarted in place, and when
    Horovod gives up, the whole job is started again from its newest commit, in its hosts' memory or at
    the checkpoint root. Options that are not listed here are handed on to horovodrun.
    `hvdrecover config` lists the settings that can be given by variables as well, or in the part
    `hvdrecover:` of horovodrun's --config-file.
    """
    parser.usage = "hvdrecover run -np N [horovodrun's options] [options] python train.py ..."
    parser.epilog = options.DURATIONS
    add = parser.add_argument
    options.add_settings(parser)
    preflight = "check the hosts before the job starts, and leave out those that are broken (docs/doctor.md)"
    add("--preflight", action="store_true", help=preflight)
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="show how Horovod was built, and exit")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    job = parser.add_argument_group("the job, as for horovodrun")
    add = job.add_argument
    add("-np", "--num-proc", **options.PROCESSES, required=True, help="processes to start with")
    least = "resume with so few processes when hosts are lost (default: as -np; the job waits for hosts)"
    add("--min-np", "--min-num-proc", **options.COUNT, dest="least", help=least)
    most = "use no more than these, however many slots there are (default: all slots)"
    add("--max-np", "--max-num-proc", **options.COUNT, dest="most", help=most)
    program = "find hosts by a program that writes a line host:slots for each"
    script: dict[str, Any] = {"metavar": "COMMAND", "dest": "discovery", "help": program}
    options.add_hosts(job).add_argument("--host-discovery-script", **script)
    mpi = "start by mpirun; then the loss of any process restarts the whole job"
    add("--mpi", action="store_true", help=mpi)
    if (theirs := _horovodrun()) is not None:
        take_options(parser, theirs)


def add_worker(parser: argparse.ArgumentParser) -> None:
    """Start a training process and watch over it. `hvdrecover run` starts one for each slot of a job."""
    parser.usage = "hvdrecover worker [options] -- python train.py ..."
    parser.epilog = options.DURATIONS
    options.add_settings(parser, *_OF_A_GUARDIAN)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


# -- the options of horovodrun -------------------------------------------------------------------------


class _CheckBuild(argparse.Action):
    def __call__(self, *_: Any) -> NoReturn:
        importlib.import_module("horovod.runner.launch").check_build(verbose=False)
        sys.exit()


class _HandOn(argparse.Action):
    """An option for another program: it is added to ``others`` as that program takes it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        # A value may begin with a dash: --mpi-args=--oversubscribe.
        words = [f"{option}={values[0]}"] if len(values) == 1 else [option, *values]
        namespace.others = [*namespace.others, *words]


def take_options(parser: argparse.ArgumentParser, theirs: argparse.ArgumentParser) -> None:
    """Let a command take the options of another parser as well; they are collected in ``others``."""
    for action in theirs._actions:
        names = [name for name in action.option_strings if name not in parser._option_string_actions]
        if names:
            nargs = 1 if action.nargs is None else action.nargs
            settings: dict[str, Any] = {"nargs": nargs, "dest": "others", "default": []}
            parser.add_argument(*names, action=_HandOn, help=argparse.SUPPRESS, **settings)


def _horovodrun() -> argparse.ArgumentParser | None:
    """Return the parser of horovodrun, whose only function makes and uses it; None without Horovod."""
    try:
        launch: Any = importlib.import_module("horovod.runner.launch")
    except ImportError:
        return None
    made: list[argparse.ArgumentParser] = []

    def note(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        made.append(parser)
        sys.exit()

    parse_args = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = note  # type: ignore[assignment, method-assign]
    try:
        with suppress(SystemExit):
            launch.parse_args()
    finally:
        argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]
    return made[0]


def check_values(others: Sequence[str]) -> None:
    """Exit with 2 if horovodrun would refuse a value of its options."""
    if others and (theirs := _horovodrun()) is not None:
        theirs.parse_known_args(["-np", "1", *others])


# -- run and worker ------------------------------------------------------------------------------------


def run_worker(arguments: argparse.Namespace) -> int:
    read = config.read({**config.environment(), **options.given(arguments)})
    with output.unblocked("stderr"):
        events.show_on_terminal(read)
        return guardian.guard(arguments.command, read)


def run_run(arguments: argparse.Namespace) -> int:
    from hvdrecover.launch import horovodrun, slurm, supervisor

    if (arguments.least or 1) > arguments.processes:
        arguments.refuse(f"--min-np {arguments.least} is more than -np {arguments.processes}")
    if (arguments.most or arguments.processes) < arguments.processes:
        arguments.refuse(f"--max-np {arguments.most} is less than -np {arguments.processes}")
    check_values(arguments.others)
    with output.unblocked("stderr"):
        own = config.environment()
        environ = {**_of_file(arguments.others), **own, **options.given(arguments)}
        read = config.read(environ)
        events.show_on_terminal(read)
        folder = read.events or events.new_run(SYSTEM_CLOCK).absolute()
        read = replace(read, events=folder)
        if not (ours := horovodrun.is_ours()):
            events.logger.warning(horovodrun.FOREIGN)
        # The job's processes get the settings by their environment.
        told = {name: text for name, text in environ.items() if own.get(name) != text}
        told |= horovodrun.settings(read.hang_timeout, own, ours=ours)
        told["HVDRECOVER_EVENTS"] = str(folder)
        if read.checkpoint:
            told["HVDRECOVER_CHECKPOINT"] = read.checkpoint
        request = _request(arguments)
        job = _options(arguments, request)
        if arguments.preflight:
            from hvdrecover.cli import trying

            job = trying.preflight(job, request, read)
        allocation = slurm.of_environment(own, SYSTEM_CLOCK)
        return supervisor.Supervisor(arguments.command, job, told, read, allocation).run()


def _of_file(others: Sequence[str]) -> dict[str, str]:
    """Return the variables for the settings in the part ``hvdrecover`` of horovodrun's ``--config-file``."""
    given = [word.partition("=")[2] for word in others if word.startswith("--config-file=")]
    if not given:
        return {}
    yaml: Any = importlib.import_module("yaml")  # Horovod needs it as well
    try:
        document = yaml.safe_load(Path(given[-1]).read_text())
        settings = (document or {}).get("hvdrecover") or {}
        texts = {
            str(name): str(int(each) if each in (True, False) else each) for name, each in settings.items()
        }
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        problem = f"must be YAML, with settings such as grace: 60s below hvdrecover:, got {error}"
        raise ConfigError("--config-file", f"'{given[-1]}' {problem}") from error
    known = {setting.flag.removeprefix("--"): setting.variable for setting in config.SETTINGS}
    if unknown := sorted(set(texts) - set(known)):
        problem = f"'{given[-1]}' has an unknown setting '{unknown[0]}'; the settings are {', '.join(known)}"
        raise ConfigError("--config-file", problem)
    return {known[name]: text for name, text in texts.items()}


def _request(arguments: argparse.Namespace) -> list[str] | None:
    """Return what ``--discover`` asks for, with the options that follow from the job's; None without it."""
    if arguments.discover is None:
        return None
    words = [] if arguments.mpi else ["--allow-empty"]
    for name, option in ("most", "--max-np"), ("ssh_port", "--ssh-port"), ("identity", "--identity"):
        value = getattr(arguments, name)
        words += [option, str(value)] if value is not None else []
    return discovering.request(arguments.discover, words)


def _options(arguments: argparse.Namespace, request: Sequence[str] | None) -> Options:
    """Return the options for horovodrun; those with which no restart would help are refused."""
    from hvdrecover.launch import horovodrun

    names = ("processes", "least", "most", "hosts", "hostfile", "discovery", "ssh_port", "identity", "mpi")
    known = {name: getattr(arguments, name) for name in names}
    if request is not None:
        hosts = discovering.find(request)  # before the job starts, so that people see errors
        if arguments.mpi:  # the hosts cannot change
            known["hosts"] = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        else:
            known["discovery"] = discovering.script(request)
    interfaces, others = tuple(arguments.interfaces), tuple(arguments.others)
    job = horovodrun.Options(**known, interfaces=interfaces, others=others)
    if job.identity is not None and not Path(job.identity).expanduser().is_file():
        arguments.refuse(f"--identity: there is no file '{job.identity}'")
    if job.discovery is None:
        try:
            slots = sum(horovodrun.hosts(job).values())
        except (ConfigError, DiscoveryError) as error:
            arguments.refuse(str(error))
        if slots < job.processes and not job.mpi:
            few = f"the hosts have too few slots: {slots}, and -np asks for {job.processes}"
            arguments.refuse(f"{few}; write HOST:SLOTS")
    return job


# -- config --------------------------------------------------------------------------------------------


def add_config(parser: argparse.ArgumentParser) -> None:
    """A setting is an environment variable. Those with an option can be given to `hvdrecover run`, too."""
    options.add_json(parser)


def run_config(arguments: argparse.Namespace) -> int:
    from hvdrecover.cli import printer

    environ = config.environment()
    config.read(environ)  # an invalid value is an error
    settings = []
    for each in config.SETTINGS:
        value = redact(environ[each.variable]) if environ.get(each.variable) else None
        option = each.flag if each.option else None
        settings.append({"variable": each.variable, "option": option, "value": value, "help": each.help})
    rows = [[text or "" for text in each.values()] for each in settings]
    table = printer.table(("variable", "option", "value", "meaning"), rows)
    printer.put({"settings": settings}, [table], as_json=arguments.json)
    return 0


# -- install-horovod -----------------------------------------------------------------------------------


def add_install_horovod(parser: argparse.ArgumentParser) -> None:
    """It is built for this environment's Python, PyTorch, TensorFlow and MPI. A wheel that was built before
    is taken from the cache. HOROVOD_* variables steer the build: HOROVOD_GPU_OPERATIONS=NCCL,
    HOROVOD_WITHOUT_MPI=1 and so on.
    """
    rebuild = "compile again, even if it is installed or cached"
    parser.add_argument("--rebuild", action="store_true", help=rebuild)
    diff = "print all changes to Horovod's source, and install nothing"
    parser.add_argument("--diff", action="store_true", help=diff)


def run_install_horovod(arguments: argparse.Namespace) -> int:
    from hvdrecover.install.horovod import install_horovod, source_diff

    options.end_by_exception()
    said = source_diff() if arguments.diff else f"{install_horovod(rebuild=arguments.rebuild)}\n"
    sys.stdout.write(said)
    return 0
