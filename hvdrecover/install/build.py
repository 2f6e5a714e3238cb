"""Building one Horovod wheel in a temporary folder.

1. Download Horovod's source, check its digest, and unpack it (`fetch`).
2. Write the licences and the diff of our edits beside it, for the wheel, and apply the edits.
3. Install the build tools, by pinned hashes, into a folder of their own: the environment stays as it is.
4. Compile, with the variables of `build_environment`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hvdrecover.errors import InstallError
from hvdrecover.install.edits import EDITS, apply, diff
from hvdrecover.install.environment import HOROVOD_VERSION, Frameworks, Mpi, build_path, find_nccl
from hvdrecover.install.process import Runner, show

_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # its source on PyPI
TOOLS = Path(__file__).with_name("build-tools.txt")  # requirements of the build, with hashes
_BYTES_PER_JOB = 2 << 30  # to compile one file with PyTorch's headers, at worst


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
    """Return the variables that offer PyTorch's NCCL to the build.

    Its wheel lacks the file name that linkers look for, so ``folder`` gets links. They must stay: the built
    library looks there for NCCL last.
    """
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
    environ: Mapping[str, str], frameworks: Frameworks, mpi: Mpi, tools: Path, label: str
) -> dict[str, str]:
    """Return the environment variables of the build; the user's own ``HOROVOD_*`` ones win.

    `tools` is the folder with the build tools, `label` the local part of the wheel's version.
    """
    wanted = {
        "GLOO": True,
        "MPI": mpi.identity != "none",
        "PYTORCH": frameworks.torch is not None,
        "TENSORFLOW": frameworks.tensorflow is not None,
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
    if mpi.identity.startswith("PyPI"):
        built["OPAL_PREFIX"] = sys.prefix  # where its compiler wrapper looks for headers and libraries
    return built


def build_wheel(
    environ: Mapping[str, str], frameworks: Frameworks, mpi: Mpi, folder: Path, runner: Runner, work: Path
) -> Path:
    """Build Horovod's wheel for the current environment, and return it.

    `folder` is the build's folder in the cache, `work` an empty folder for all files of the build, without
    spaces in its path.
    """
    source = fetch(runner, work, environ)
    # Files of such names go into the wheel, beside Horovod's own LICENSE.
    (source / "NOTICE-hvdrecover.diff").write_bytes(diff(EDITS, source).encode())
    (source / "NOTICE-hvdrecover").write_text(notice())
    apply(EDITS, source)
    tools = work / "tools"
    install = pip("install", "--target", str(tools), "--require-hashes", "-r", str(TOOLS))
    runner.run("Fetching the build tools", install, environ=environ)
    if nccl := find_nccl(environ):
        environ = {**environ, **offer_nccl(nccl, folder)}
    show(f"Compiling takes some minutes; {runner.log} has its output.")
    variables = build_environment(environ, frameworks, mpi, tools, folder.name)
    runner.run(
        f"Compiling Horovod ({variables['MAKEFLAGS']})",
        [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(work / "dist")],
        environ=variables,
        cwd=source,
    )
    return next((work / "dist").glob("horovod-*.whl"))
