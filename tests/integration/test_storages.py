"""Durable commits on each kind of storage: a job is killed, its newest commit is damaged, and it resumes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest

from tests.contracts.servers import BUCKET, HOST, SSHD, STORES, S3Server, SftpServer
from tests.integration.conftest import LONG, Start
from tests.support.commands import call, call_json
from tests.support.jobs import PATIENCE, DigitsRun, run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "few_steps.py"
KILLED = 3  # exit code of the script when it stops in the middle

pytestmark = pytest.mark.acceptance

Place = tuple[str, str, dict[str, Any]]
"""The URL of a checkpoint root that does not exist yet, fsspec's protocol, and fsspec's options for it."""


@contextmanager
def local(folder: Path) -> Iterator[Place]:
    yield str(folder / "root"), "file", {}


@contextmanager
def s3(folder: Path) -> Iterator[Place]:
    server = S3Server()
    server.start()
    options = {"key": "user", "secret": "secret", "endpoint_url": f"http://{HOST}:{server.port}"}
    fsspec.filesystem("s3", **options).mkdir("bucket")
    try:
        yield "s3://bucket/root", "s3", options
    finally:
        server.stop()


@contextmanager
def sftp(folder: Path) -> Iterator[Place]:
    if SSHD is None:
        message = "there is no sshd; on Debian and Ubuntu: apt-get install openssh-server"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    (folder / "sshd").mkdir()
    server = SftpServer(folder / "sshd")
    server.start()
    known = folder / "known_hosts"
    known.write_text(server.known_hosts())
    options = {"known_hosts": str(known), "username": server.user, "key_filename": str(server.key)}
    try:
        yield f"sftp://{HOST}:{server.port}{folder}/root", "sftp", options
    finally:
        server.stop()


@contextmanager
def emulated(name: str, folder: Path) -> Iterator[Place]:
    """An emulator of Google's or Microsoft's object store."""
    server = STORES[name](folder)
    server.start()
    try:
        yield f"{server.protocol}://{BUCKET}/root", server.protocol, server.options
    finally:
        server.stop()


EMULATED = ("gcs", "azurite")
KINDS = {"local": local, "s3": s3, "sftp": sftp, **{name: partial(emulated, name) for name in EMULATED}}


def flip_the_last_bit(url: str, options: Mapping[str, Any], file: str) -> None:
    """Damage a file of a root, behind the server's back where its files lie on this host."""
    path = Path(urlsplit(url).path) / file
    if path.exists():
        filesystem, name = fsspec.filesystem("file"), str(path)
    else:
        filesystem, name = fsspec.filesystem(url.partition(":")[0], **options), f"{url}/{file}"
    content = filesystem.cat_file(name)
    filesystem.pipe_file(name, content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    log = train(folder, {"HVDRECOVER_CHECKPOINT": str(folder / "root")})
    return re.findall(r"weights (\w+)", log)[0]


def train(folder: Path, environ: dict[str, str], code: int = 0) -> str:
    return run_job(
        [sys.executable, str(SCRIPT)], folder / "log", {"OMP_NUM_THREADS": "1", **environ}, code=code
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=LONG if kind in EMULATED else ()) for kind in KINDS]
)
def test_a_killed_job_walks_back_over_a_damaged_commit_and_ends_bitwise_equal(
    kind: str, weights: str, tmp_path: Path
) -> None:
    with KINDS[kind](tmp_path) as (url, protocol, options):
        environ = {"HVDRECOVER_CHECKPOINT": url, f"FSSPEC_{protocol.upper()}": json.dumps(options)}
        train(tmp_path, {**environ, "STOP": "4"}, KILLED)
        newest, older = call_json("ls", url, environ=environ)["commits"][:2]
        assert newest["state"] == older["state"] == "complete"
        assert call_json("verify", url, environ=environ)["intact"]

        flip_the_last_bit(url, options, f"{newest['commit']}/model.safetensors")
        done = call("verify", url, environ=environ)
        assert done.returncode == 1 and newest["commit"] in done.stdout + done.stderr

        log = train(tmp_path, environ)
        assert re.findall(r"started (\d+)", log) == ["0", str(older["number"])]
        assert re.findall(r"weights (\w+)", log) == [weights]
        states = {each["commit"]: each["state"] for each in call_json("ls", url, environ=environ)["commits"]}
        assert states[newest["commit"]] == "quarantined"
        assert "finished" in states.values()


def test_a_foreign_root_stops_all_ranks_with_one_clear_error(start: Start, tmp_path: Path) -> None:
    run = DigitsRun(tmp_path, 1)
    run.root.mkdir()
    (run.root / "thesis.tex").write_text("irreplaceable")
    job = start(run, static(2))
    assert job.wait(PATIENCE) != 0
    assert re.search(f"{run.root}: .*'thesis.tex'", run.log)
    assert "ForeignRootError" in run.log
    assert [path.name for path in run.root.iterdir()] == ["thesis.tex"]
    assert run.batches() == []
