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

import psutil
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
    """moto's S3 server, over HTTP, in a thread. Its buckets outlive `stop`.

    Attributes:
        port: where it listens.
        fault: is asked about every request first, as ``METHOD path?query``; True has it refused.
        lost: likewise; True has it done, and its answer lost on the way.
        conditions: whether it heeds If-None-Match, as some stores that speak S3's language don't.
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
    """A program that ends with this process. Its data outlive `stop`.

    Attributes:
        command: what is run.
        folder: where it stores, and logs to a file of the program's name.
        ending: the signal that ends it.
    """

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
