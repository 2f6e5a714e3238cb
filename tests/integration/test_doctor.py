"""``hvdrecover doctor`` as a user runs it: on a healthy machine, and with real faults."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.contracts.servers import HOST, S3Server
from tests.integration.mounts import mounted
from tests.support.commands import wait_until
from tests.support.jobs import command, kill_marked, marked

PATIENCE = 600.0  # seconds; on a busy machine, TensorFlow alone takes half a minute to import
DOCS = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
FRAMEWORKS = [name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)]
# Hosts without a login, in two ways.
NOWHERE = ["-H", "localhost:1,nowhere.invalid:1"]
REFUSED = ["-H", "localhost:1,127.0.0.2:1", "-p", "1"]
GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"  # a root with the commit g0001-c00000120
SECRET = "a-secret-of-the-bucket"

pytestmark = pytest.mark.acceptance


def as_from_a_terminal() -> None:
    """Heed Ctrl-C, which tests that run in the background, and all that they start, would ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Doctor:
    """The command, with a folder for temporary files and a mark of its own."""

    folder: Path
    mark: str = field(default_factory=lambda: f"HVDTEST_DOCTOR={uuid.uuid4().hex}")

    def start(self, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        name, _, value = self.mark.partition("=")
        return subprocess.Popen(
            [sys.executable, "-m", "hvdrecover", "doctor", *words],
            env={**os.environ, **(environ or {}), "TMPDIR": str(self.folder), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=as_from_a_terminal,
        )

    def run(self, *words: str, environ: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Exit code and findings, the last one of each check."""
        process = self.start("--json", *words, environ=environ)
        output, errors = process.communicate(timeout=PATIENCE)
        assert errors == "", errors
        self.assert_nothing_is_left()
        document = json.loads(output)
        return process.returncode, {finding["check"]: finding for finding in document["findings"]}

    def processes(self) -> list[int]:
        return marked(self.mark)

    def assert_nothing_is_left(self) -> None:
        assert self.processes() == []
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def doctor(tmp_path: Path) -> Iterator[Doctor]:
    (tmp_path / "tmp").mkdir()
    made = Doctor(tmp_path / "tmp")
    yield made
    kill_marked(made.mark)


def test_a_healthy_machine_passes_and_nothing_is_left(doctor: Doctor, tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet" / "there"
    with doctor.start("--json", "-np", "2", "--checkpoint", str(root), "--state-size", "1M") as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, ""), output
    doctor.assert_nothing_is_left()
    assert not (tmp_path / "not").exists()
    document = json.loads(output)
    found = {finding["check"]: finding for finding in document["findings"]}
    alone = {"ssh", "network", "clocks", "root: shared"}
    assert {check for check, each in found.items() if each["outcome"] == "skipped"} == alone
    assert {each["outcome"] for check, each in found.items() if check not in alone} == {"ok"}, output
    assert (document["ok"], document["ranks"]) == (True, {"localhost": 2})
    for word in ("with gloo", *FRAMEWORKS):
        assert word in found["horovod"]["what"]
    named = [*found, *document, *document["findings"][0]]
    assert [name for name in named if name not in DOCS] == []


def test_a_root_that_is_read_only_and_a_host_of_no_such_name(doctor: Doctor, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", tmp_path / "image", 1 << 24) as disk:
        disk.remount("ro")
        code, found = doctor.run(*NOWHERE, "--checkpoint", str(disk.folder / "root"))
    assert code == 1
    assert found["ssh"]["outcome"] == "failure"
    assert "nowhere.invalid" in found["ssh"]["what"] and "resolve" in found["ssh"]["what"]
    assert "DNS" in found["ssh"]["remedy"]
    assert found["root: writing"]["outcome"] == "failure"
    assert "Read-only file system" in found["root: writing"]["what"]
    assert "permissions" in found["root: writing"]["remedy"]


def test_a_root_that_is_full_and_a_port_without_an_ssh_server(doctor: Doctor, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", tmp_path / "image", 1 << 24) as disk:
        disk.fill(spare=1 << 20)
        code, found = doctor.run(*REFUSED, "--checkpoint", str(disk.folder / "root"), "--state-size", "1G")
        assert [each.name for each in disk.folder.iterdir()] == ["ballast"]
    assert code == 1
    assert found["ssh"]["outcome"] == "failure"
    assert "127.0.0.2" in found["ssh"]["what"] and "Connection refused" in found["ssh"]["what"]
    assert "-p" in found["ssh"]["remedy"]
    assert "No space left on device" in found["root: writing"]["what"]
    assert found["root: space"]["outcome"] == "failure"


def test_commits_and_other_files_stay_as_they_are(doctor: Doctor, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "root")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("the only copy")
    before = everything(tmp_path / "root"), everything(tmp_path / "foreign")
    _, found = doctor.run(*NOWHERE, "--checkpoint", str(tmp_path / "root"))
    assert "g0001-c00000120" in found["checkpoint root"]["what"]
    assert {found[check]["outcome"] for check in ("checkpoint root", "root: writing")} == {"ok"}
    code, found = doctor.run(*NOWHERE, environ={"HVDRECOVER_CHECKPOINT": str(tmp_path / "foreign")})
    assert (code, found["checkpoint root"]["outcome"]) == (1, "failure")
    assert "thesis.txt" in found["checkpoint root"]["what"]
    assert "root: writing" not in found
    assert (everything(tmp_path / "root"), everything(tmp_path / "foreign")) == before


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_a_bucket_that_is_there_and_one_that_is_not(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server()
    server.start()
    try:
        options = {"key": "user", "secret": SECRET, "endpoint_url": f"http://{HOST}:{server.port}"}
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        filesystem, bucket = fsspec.filesystem("s3"), f"bucket-{uuid.uuid4().hex}"
        filesystem.mkdir(bucket)
        environ = {"FSSPEC_S3": json.dumps(options)}
        _, found = doctor.run(*NOWHERE, "--checkpoint", f"s3://{bucket}/runs/one", environ=environ)
        assert found["root: writing"]["outcome"] == "ok", found
        assert found["root: space"]["outcome"] == "skipped"
        filesystem.invalidate_cache()
        assert filesystem.find(bucket) == []
        code, found = doctor.run(*NOWHERE, "--checkpoint", "s3://no-such-bucket/one", environ=environ)
    finally:
        server.stop()
    assert code == 1
    assert found["checkpoint root"]["outcome"] == "failure"
    assert "bucket does not exist" in found["checkpoint root"]["what"]
    assert SECRET not in json.dumps(found) and HOST not in found["checkpoint root"]["what"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interrupted_doctor_leaves_nothing(
    doctor: Doctor, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    process = doctor.start("--checkpoint", str(root))
    # While it imports Horovod.
    wait_until(lambda: any("horovod." in " ".join(command(each)) for each in doctor.processes()), PATIENCE)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    doctor.assert_nothing_is_left()
    assert not root.exists()
