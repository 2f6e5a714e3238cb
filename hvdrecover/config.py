"""What the environment says, read once into a frozen dataclass.

This is the only module that reads environment variables; a test holds the others to it.

============================== =====================================================================
``HVDRECOVER_CHECKPOINT``      checkpoint root of states that are made without ``checkpoint=``
``HVDRECOVER_EVENTS``          folder for event files, one per process; created when missing
``HVDRECOVER_LOG``             ``debug``, ``info`` (default), ``warning`` or ``error``
``HVDRECOVER_MAX_DURABLE_AGE`` for how many seconds commits that are due may fail to become durable
                               before the job is stopped; without it, training goes on
============================== =====================================================================
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import ConfigError

_LOG_LEVELS = ("debug", "info", "warning", "error")

_CHOICE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
_GLOO_LAUNCHED = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_CHOOSER = "HVDRECOVER_CONTROLLER_CHOSEN_BY"

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


@dataclass(frozen=True)
class Config:
    """Settings of one process.

    Attributes:
        checkpoint: checkpoint root for states that name none, or None.
        events: folder for this process's event file, or None to write none.
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
        checkpoint=env.get("HVDRECOVER_CHECKPOINT") or None,
        events=Path(events) if events else None,
        log=log,
        elastic=env.get("HOROVOD_ELASTIC") == "1",
        launched=any(name in env for name in _LAUNCHER_VARIABLES),
        controller_chosen="HOROVOD_CONTROLLER" in env and chooser is None,
        controller_inherited=chooser not in (None, str(os.getpid())) and _GLOO_LAUNCHED not in env,
        host=env.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        max_durable_age=_seconds(env, "HVDRECOVER_MAX_DURABLE_AGE"),
        collective_seconds=_seconds(env, "HOROVOD_GLOO_TIMEOUT_SECONDS") or 30.0,
    )


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(name, f"'{text}' is not a number of seconds above 0")
    return seconds


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


def quiet_tensorflow() -> None:
    """Keep TensorFlow's start-up messages off the terminal, unless ``HVDRECOVER_LOG`` asks for all there is.

    For our own commands; must be called before TensorFlow is imported.
    """
    if read().log != "debug":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
