"""Host discovery of many hosts: the command that Horovod's driver runs each second, with real connections."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import stopwatch
from benchmarks.rows import Curve
from benchmarks.states import Setting

_HOSTS = {"full": (10, 100, 1000), "small": (2, 8)}
_SLOTS = 8
_CALLS = {"full": 5, "small": 1}
_PAUSE = 1.1  # seconds after which the source is asked again


def measure(setting: Setting) -> list[Curve]:
    """Seconds of the first call, which waits for all checks, and of later ones."""
    first: dict[float, list[float]] = {}
    later: dict[float, list[float]] = {}
    with _ssh_ports() as port:
        for hosts in _HOSTS[setting.size]:
            command = _command(setting.folder, hosts, port)
            first[float(hosts)] = [stopwatch(lambda command=command: _call(command))]  # type: ignore[misc]
            later[float(hosts)] = []
            for _ in range(_CALLS[setting.size]):
                time.sleep(_PAUSE)
                later[float(hosts)].append(stopwatch(lambda command=command: _call(command)))  # type: ignore[misc]
    what = "host discovery"
    return [
        Curve("hosts", f"{what}, the first call: all hosts are checked", "s", "hosts", "measured", first),
        Curve("hosts", f"{what}, a call each second", "s", "hosts", "measured", later),
    ]


def _command(folder: Path, hosts: int, port: int) -> list[str]:
    """Return the command for so many hosts, all of which are names of this one's loopback."""
    listed = folder / f"{hosts}.hosts"
    names = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(hosts)]
    listed.write_text("".join(f"{name}:{_SLOTS}\n" for name in names))
    words = ["--ssh-port", str(port), "--cache", str(folder / f"{hosts}.cache")]
    return [sys.executable, "-m", "hvdrecover", "discover", "file", str(listed), *words]


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _ssh_ports() -> Iterator[int]:
    """Within this, a port of all loopback addresses takes connections, as sshd would."""
    with socket.create_server(("", 0), backlog=4096) as server:

        def take() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:  # it is closed
                    return

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1]
