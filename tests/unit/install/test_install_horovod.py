"""The installation as a whole, as far as it goes without a network and a compiler."""

from __future__ import annotations

import ensurepip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdrecover import cli
from hvdrecover.errors import InstallError
from hvdrecover.install import horovod
from hvdrecover.install.environment import HOROVOD_VERSION, Mpi, describe
from hvdrecover.install.horovod import MPI_REQUIREMENTS

ROOT = Path(__file__).parents[3]

SWITCHES = {"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MPI": "1"}


def label(variables: dict[str, str]) -> str:
    """Return the label of the build for an environment with torch alone."""
    return horovod.label_of(describe(variables, {"torch": "9.9"}, Mpi("none")))


def add_distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_environment_that_has_the_build_is_left_alone(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    variables |= SWITCHES | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    version = f"{HOROVOD_VERSION}+{label(variables)}"
    add_distribution(tmp_path, "torch", "9.9")
    add_distribution(tmp_path, "horovod", version)
    program = (
        "import sys; from hvdrecover.cli import main; status = main(['install-horovod']); "
        "assert not {'torch', 'tensorflow', 'horovod', 'rich'} & sys.modules.keys(); sys.exit(status)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"Horovod {version} is already installed.\n"
    assert not (tmp_path / "cache").exists()


def test_an_error_is_one_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    monkeypatch.setenv("HOROVOD_WITHOUT_TENSORFLOW", "1")
    assert cli.main(["install-horovod"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hvdrecover: the environment ") and err.count("\n") == 1
    assert "pip install 'hvdrecover[torch]'" in err


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"version": "1", "gloo": True, "mpi": False}, r"version .*'1' .*'1\+x'"),
        ({"version": "1+x", "gloo": False, "mpi": True}, "gloo .*False .*True.* mpi .*True .*False"),
        ({}, "version .*None"),
    ],
)
def test_any_other_answer_is_an_error(facts: dict[str, object], complaint: str) -> None:
    lines = ["noise\n", json.dumps(facts) + "\n", "more noise\n"]
    with pytest.raises(InstallError, match=complaint):
        horovod.check_answer("horovod.torch", lines, {"version": "1+x", "gloo": True, "mpi": False})


def test_the_page_lists_all_packages_of_an_installation_without_a_network() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("$ pip download")]
    named = {word for command in commands for word in command}
    assert {f"horovod=={HOROVOD_VERSION}", *MPI_REQUIREMENTS} <= named
    assert "horovod.TOOLS" in page


def test_each_build_tool_has_a_version_and_hashes_and_what_horovod_needs_is_among_them() -> None:
    pinned = re.findall(
        r"^([a-z0-9]+)==\S+.*((?:\n +--hash=sha256:[0-9a-f]{64}.*)+)", horovod.TOOLS.read_text(), re.M
    )
    assert {"cmake", "setuptools", "wheel", "cffi", "cloudpickle", "packaging", "psutil", "pyyaml"} <= {
        name for name, _ in pinned
    }


def test_the_extras_let_the_pins_in_and_replace_no_tensorflow_by_another() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "scripts" / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    extras = project["optional-dependencies"]
    for extra, pinned in (("torch", "torch"), ("tensorflow", "tensorflow-cpu")):
        required = Requirement(*extras[extra])
        assert required.name == extra
        assert pins[pinned] in required.specifier
        assert "999" in required.specifier


# -- an environment of uv's, which has no pip ---------------------------------------------------------------


FAKE_HOROVOD = """
def gloo_built(): return True
def mpi_built(): return False
nccl_built = cuda_built = mpi_built
"""


def write_wheel(folder: Path, version: str) -> None:
    """Put a wheel of a Horovod that answers as a real one does into the cache."""
    folder.mkdir(parents=True)
    info = f"horovod-{version}.dist-info"
    with zipfile.ZipFile(folder / f"horovod-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
        wheel.writestr("horovod/torch.py", FAKE_HOROVOD)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("has_uv", [True, False])
def test_an_environment_of_uvs_without_pip(has_uv: bool, tmp_path: Path) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert uv is not None
    packages, env, site = tmp_path / "packages", tmp_path / "env", Path(sysconfig.get_path("purelib"))
    packages.mkdir()
    for each in site.iterdir():  # all that hvdrecover needs, but no pip, and no Horovod
        if not re.match(r"pip\b|horovod|torch\b|torch-|tensorflow", each.name):
            (packages / each.name).symlink_to(each)
    add_distribution(packages, "torch", "9.9")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, env], check=True)
    bundled = Path(ensurepip._WHEEL_PKG_DIR or Path(ensurepip.__file__).with_name("_bundled"))  # type: ignore[attr-defined]
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "UV_"))
    }
    variables |= SWITCHES | {"PYTHONPATH": f"{ROOT}:{packages}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    variables |= {"UV_FIND_LINKS": str(bundled), "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "uv")}
    variables |= {"PATH": f"{Path(uv).parent}:/usr/bin:/bin" if has_uv else str(tmp_path)}
    name = label(variables)
    write_wheel(tmp_path / "cache" / "hvdrecover" / "wheels" / name, f"{HOROVOD_VERSION}+{name}")
    command = [env / "bin" / "python", "-m", "hvdrecover", "install-horovod"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    if has_uv:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "(from the cache: " in done.stdout
        assert list(env.glob("lib/*/site-packages/horovod/torch.py"))
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert "no pip" in done.stderr and "uv on PATH" in done.stderr
