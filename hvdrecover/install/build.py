"""Building one Horovod wheel: fetch, unpack, edit, compile; all in a temporary folder."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hvdrecover.errors import InstallError
from hvdrecover.install.edits import EDITS, apply, diff
from hvdrecover.install.environment import Plan, build_environment, find_nccl
from hvdrecover.install.pins import BUILD_REQUIREMENTS, HOROVOD_SHA256, HOROVOD_VERSION
from hvdrecover.install.process import Runner


def pip(*arguments: str) -> list[str]:
    """Return a pip command for the current environment.

    Raises:
        InstallError: the environment has no pip, and uv is not on ``PATH``.
    """
    options = ["--disable-pip-version-check", "--no-input", *arguments]
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", *options]
    if (uv := shutil.which("uv")) is None:
        raise InstallError(
            f"the environment {sys.prefix} has no pip, and there is no uv on PATH: one of them must install "
            f"Horovod. Run `{sys.executable} -m ensurepip`, or put uv on PATH. Then run this command again."
        )
    # uv's own `uv pip` can't download a source, and knows nothing of PIP_* variables.
    return [uv, "tool", "run", "--python", sys.executable, "pip", "--python", sys.executable, *options]


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder whose path has no spaces: compiler flags are split at them."""
    place = "/tmp" if re.search(r"\s", tempfile.gettempdir()) else None
    return tempfile.TemporaryDirectory(prefix="hvdrecover-build-", dir=place)


def fetch(runner: Runner, work: Path, environ: Mapping[str, str]) -> Path:
    """Download Horovod's source, check it against its digest, and unpack it."""
    pinned = work / "horovod.txt"
    pinned.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n")
    options = ["--no-deps", "--no-binary", "horovod", "--require-hashes", "-r", str(pinned), "-d", str(work)]
    runner.run(f"Fetching Horovod {HOROVOD_VERSION}", pip("download", *options), environ=environ)
    archive = work / f"horovod-{HOROVOD_VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        # Debian 12's Python 3.11.2 has no filters.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(work)
    return work / f"horovod-{HOROVOD_VERSION}"


def _without_spaces(prefix: Path, work: Path, tools: Path) -> Path:
    """Return the environment's root, by way of a link where its own path has spaces.

    The ``mpicxx`` of PyPI's Open MPI prints its real path all the same. What it runs, ``opal_wrapper``, goes
    by its own name and by ``OPAL_PREFIX``, so links to it do. CMake looks for them beside ``mpiexec`` first.
    """
    if not re.search(r"\s", str(prefix)):
        return prefix
    link = work / "env"
    link.symlink_to(prefix, target_is_directory=True)
    programs = {"mpicc": "opal_wrapper", "mpicxx": "opal_wrapper", "mpiexec": "mpiexec"}
    if (link / "bin" / "opal_wrapper").exists():
        for name, target in programs.items():
            (tools / "bin" / name).symlink_to(link / "bin" / target)
    return link


def offer_nccl(nccl: Path, folder: Path) -> dict[str, str]:
    """Offer PyTorch's NCCL to the build, by variables; its wheel lacks the file name that linkers look for.

    The links in ``folder`` must stay: the built library looks there for NCCL last.
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
    """Return our NOTICE: the licences of the source that is edited, and of what is compiled with it."""
    # In a clone, setuptools' egg-info is found first, and has no licences.
    found = (each.read_text("licenses/NOTICE") for each in metadata.distributions(name="hvdrecover"))
    return next(filter(None, found), "")


def build_wheel(plan: Plan, runner: Runner, work: Path) -> Path:
    """Build Horovod's wheel for the current environment.

    Args:
        plan: its MPI is installed.
        runner: runs the commands.
        work: an empty folder for all files of the build, without spaces in its path.

    Returns:
        The wheel, below ``work``.

    Raises:
        InstallError: a step failed.
    """
    environ = plan.environ
    source = fetch(runner, work, environ)
    # The wheel takes files of such names along with Horovod's own LICENSE.
    (source / "NOTICE-hvdrecover.diff").write_bytes(diff(EDITS, source).encode())
    (source / "NOTICE-hvdrecover").write_text(notice())
    apply(EDITS, source)
    tools = work / "tools"
    runner.run(
        "Fetching the build tools",
        pip("install", "--target", str(tools), *BUILD_REQUIREMENTS),
        environ=environ,
    )
    root = _without_spaces(plan.prefix, work, tools)
    python = Path(sys.executable) if root == plan.prefix else root / "bin" / Path(sys.executable).name
    nccl = find_nccl(environ)
    variables = build_environment(
        {**environ, **offer_nccl(nccl, plan.folder)} if nccl else environ,
        frameworks=plan.frameworks,
        mpi=plan.mpi,
        prefix=root,
        tools=tools,
        label=plan.folder.name,
    )
    runner.run(
        f"Compiling Horovod ({variables['MAKEFLAGS']})",
        [str(python), "setup.py", "bdist_wheel", "--dist-dir", str(work / "dist")],
        environ=variables,
        cwd=source,
    )
    wheels = sorted((work / "dist").glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise InstallError(
            f"building Horovod left {len(wheels)} wheels instead of one. The log: {runner.log}"
        )
    return wheels[0]
