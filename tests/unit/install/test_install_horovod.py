"""The installation of Horovod, as far as it goes without a network and a compiler."""

from __future__ import annotations

import ensurepip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdrecover import cli
from hvdrecover.cli import options
from hvdrecover.errors import InstallError
from hvdrecover.install import environment, horovod
from hvdrecover.install.edits import EDITS
from hvdrecover.install.environment import HOROVOD_VERSION, label_of
from hvdrecover.install.horovod import Runner, explain


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r" C\+\+ .* make .* Python") as caught:
        environment.require_toolchain({"PATH": str(tmp_path)}, tmp_path)
    assert "apt-get install g++ make python3-dev`" in str(caught.value)


def test_a_site_mpi_is_known_by_its_place_and_what_it_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "path", [])
    variables = {"PATH": str(tmp_path / "opt")}
    program = tmp_path / "opt" / "mpicxx"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho -lmpi\n")
    program.chmod(0o755)
    first = environment.choose_mpi(variables)
    assert first.startswith(str(program))
    assert first == environment.choose_mpi(variables)
    program.write_text("#!/bin/sh\necho -lother\n")
    assert environment.choose_mpi(variables) != first


@pytest.mark.parametrize(
    ("variables", "offered"),
    [
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, True),
        ({"HOROVOD_GPU_ALLREDUCE": "NCCL"}, True),
        ({}, False),
        ({"HOROVOD_GPU_OPERATIONS": "MPI"}, False),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/opt/nccl"}, False),
    ],
)
def test_pytorchs_nccl_is_offered_to_a_build_with_nccl(
    tmp_path: Path, variables: dict[str, str], offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(tmp_path)])
    assert environment.find_nccl(variables) is None
    nccl = tmp_path / "nvidia" / "nccl"
    (nccl / "include").mkdir(parents=True)
    (nccl / "include" / "nccl.h").touch()
    assert environment.find_nccl(variables) == (nccl if offered else None)


def test_the_users_variables_win() -> None:
    user = {
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_CMAKE": "/my/cmake",
        "MAKEFLAGS": "-j7",
        "HOROVOD_GPU": "CUDA",
    }
    variables = {**user, "HOROVOD_LOCAL_VERSION": "theirs"}
    frameworks = {"torch": "2.13.0+cpu"}
    told = horovod.build_environment(variables, frameworks, "none", Path("/tools"), "hvdrecover.abc")
    assert user.items() <= told.items()
    assert "HOROVOD_WITH_GLOO" not in told
    assert told["HOROVOD_WITHOUT_MPI"] == "1"
    assert "OPAL_PREFIX" not in told
    assert told["HOROVOD_LOCAL_VERSION"] == "hvdrecover.abc"  # the cache depends on it


def test_nccl_is_where_the_build_looks_and_can_be_offered_again(tmp_path: Path) -> None:
    nccl, folder = tmp_path / "site" / "nccl", tmp_path / "hvdrecover.abc"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (nccl / file).parent.mkdir(parents=True, exist_ok=True)
        (nccl / file).write_text(file)
    folder.mkdir()
    for _ in range(2):
        home = Path(horovod.offer_nccl(nccl, folder)["HOROVOD_NCCL_HOME"])
        assert (home / "include" / "nccl.h").read_text() == "include/nccl.h"
        for name in ("libnccl.so", "libnccl.so.2"):
            assert (home / "lib" / name).read_text() == "lib/libnccl.so.2"
    assert home.parent == folder


def test_the_notice_that_goes_into_the_wheel_names_what_is_edited() -> None:
    edited = {edit.file.split("/")[1] for edit in EDITS if edit.file.startswith("third_party/")}
    named = {line.split(" (")[0].lower() for line in horovod.notice().splitlines() if "(https://" in line}
    assert named == {"horovod", *edited}


def test_each_command_returns_its_own_output_and_the_log_has_all(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "build.log")
    for number in (1, 2):
        command = ["/bin/sh", "-c", f"echo out {number}; echo err {number} >&2"]
        assert runner.run("Doing it", command, environ=os.environ) == [f"out {number}\n", f"err {number}\n"]
    with pytest.raises(InstallError, match=r"failed \(exit status 3\)\. .*build\.log\n  \| bad$"):
        runner.run("Doing it", ["/bin/sh", "-c", "echo bad; exit 3"], environ=os.environ)
    assert [word in runner.log.read_text() for word in ("out 1", "err 2", "$ /bin/sh", "bad")] == [True] * 4


def test_sigterm_ends_all_that_was_started(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    options.end_by_exception()
    script = f"sleep 60 & echo $! > {tmp_path}/child; sleep 1; kill -TERM {os.getpid()}; wait"
    with pytest.raises(SystemExit) as caught:
        Runner(tmp_path / "logs" / "build.log").run("Doing it", ["/bin/sh", "-c", script], environ=os.environ)
    assert caught.value.code == 128 + signal.SIGTERM
    for number, handler in before.items():
        signal.signal(number, handler)
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_excerpt_begins_at_the_first_error() -> None:
    before = "/usr/bin/c++ -Werror: a.cc\na.cc:1: warning: meh\n"
    excerpt = ["/src/a.cc:10:5: error: 'x' was not declared", "   10 | x = 1;", "make: *** [a.cc.o] Error 1"]
    assert explain(before + "\n\n".join(excerpt)) == "\n".join(f"  | {line}" for line in excerpt)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "Memory"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "HOROVOD_WITHOUT_MPI"),
        ("/usr/bin/ld: cannot find -lcudadevrt: No such file or directory", "lib64"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "PIP_FIND_LINKS"),
        ("ProxyError('Cannot connect to proxy.')\nERROR: No matching distribution", "correct HTTPS_PROXY"),
        ("error: externally-managed-environment", "make a virtual environment"),
    ],
)
def test_known_failures_have_a_remedy(line: str, named: str) -> None:
    assert named in explain(f"x\n{line}\n").splitlines()[-1]


ROOT = Path(__file__).parents[3]

SWITCHES = {"HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MPI": "1"}


def label(variables: dict[str, str]) -> str:
    """Return the label of the build for an environment with torch alone."""
    return label_of(variables, {"torch": "9.9"}, "none")


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


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(horovod, "version_of", lambda name: None)
    assert cli.main(["install-horovod"]) == 1
    assert re.match(
        f"hvdrecover: .*Not a directory: '{tmp_path}/file/.*XDG_CACHE_HOME", capsys.readouterr().err
    )


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
