"""Real servers for the storage tests, on the loopback and on free ports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

HOST = "127.0.0.1"
_ACCOUNT = "123456789012"  # moto's
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
# Of no server here.
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9TPT0ElKyJZ9nC0bqCW0E1m3xWDLkQbcoNnHjyKSfV"
Environ = dict[str, Any]


class S3Server:
    """moto's S3 server, over HTTP, in a thread. Its buckets outlive `stop`.

    Attributes:
        port: where it listens.
        fault: is asked about every request first, as ``METHOD path?query``; True has it refused. The method
            of those that copy a part is ``COPY`` here.
        refusal: the status with which it is refused.
        conditions: whether it heeds If-None-Match, and If-Match of what is copied, as some stores that speak
            S3's language don't.
        lost: likewise; True has it done, and its answer lost on the way.
        requests: every request that came, likewise.
    """

    def __init__(self) -> None:
        self.port = 0
        self._app = DomainDispatcherApplication(create_backend_app)
        self._one_at_a_time = threading.Lock()
        self._server: BaseWSGIServer | None = None
        self.reset()

    def reset(self) -> None:
        self.fault: Callable[[str], bool] = lambda request: False
        self.lost: Callable[[str], bool] = lambda request: False
        self.requests: list[str] = []
        self.conditions = True
        self.refusal = "400 Bad Request"

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
        method = "COPY" if "HTTP_X_AMZ_COPY_SOURCE" in environ else environ["REQUEST_METHOD"]
        request = f"{method} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.requests.append(request)
        if self.fault(request):
            start_response(self.refusal, [("Content-Length", "0")])
            return [b""]
        if not self.conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        elif method == "COPY" and not _is_the_same(environ):  # which moto does not look at
            start_response("412 Precondition Failed", [("Content-Length", "0")])
            return [b""]
        if "HTTP_IF_NONE_MATCH" not in environ:
            answer = list(self._app(environ, start_response))
        else:
            # moto looks for the object, and puts it some time after; S3 does both at once.
            with self._one_at_a_time:
                answer = list(self._app(environ, start_response))
        if self.lost(request):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return answer


def stored(bucket: str, key: str) -> Any:
    """moto's own object of a key; None if there is none."""
    return s3_backends[_ACCOUNT]["aws"].get_object(bucket, key)


def _is_the_same(environ: Environ) -> bool:
    bucket, _, key = environ["HTTP_X_AMZ_COPY_SOURCE"].lstrip("/").partition("/")
    found = stored(bucket, unquote(key))
    return found is None or found.etag == environ.get("HTTP_X_AMZ_COPY_SOURCE_IF_MATCH", found.etag)


class SftpServer:
    """OpenSSH's sshd, run by and for the user who runs the tests, with keys of its own."""

    def __init__(self, folder: Path) -> None:
        assert SSHD is not None
        self.folder = folder
        self.port = 0
        self.key = folder / "user"
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self._process: subprocess.Popen[bytes] | None = None
        for key in (folder / "host", self.key):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as the system's start of sshd does

    def start(self) -> None:
        for _ in range(5):
            self._begin(self.port or free_port())
            if self._is_up():
                return
        raise AssertionError(f"sshd does not start:\n{(self.folder / 'log').read_text()}")

    def known_hosts(self) -> str:
        """The line of a known_hosts file that has the server's key."""
        kind, key, *_ = (self.folder / "host.pub").read_text().split()
        return f"[{HOST}]:{self.port} {kind} {key}\n"

    def stop(self) -> None:
        """End the server and its sessions."""
        assert self._process is not None
        sessions = self.sessions()
        self._process.kill()
        self._process.wait()
        kill(sessions)

    def sessions(self) -> list[psutil.Process]:
        """The processes that serve connections."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def _begin(self, port: int) -> None:
        config = self.folder / "config"
        config.write_text(
            f"ListenAddress {HOST}\nPort {port}\nHostKey {self.folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self.key}.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxSessions 1000\nMaxStartups 100\n"
            "Subsystem sftp internal-sftp\n"
        )
        assert SSHD is not None
        with (self.folder / "log").open("ab") as log:
            command = [SSHD, "-D", "-e", "-f", config]
            self._process = subprocess.Popen(command, stderr=log, preexec_fn=die_with_parent)
        self.port = port

    def _is_up(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + 30
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with socket.create_connection((HOST, self.port), timeout=5) as connection:
                    if connection.recv(4) == b"SSH-":
                        return True
            except OSError:
                time.sleep(0.01)
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
