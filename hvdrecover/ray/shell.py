"""The stand-in for ssh in a job on Ray: it has a seat of a host run a command, and is its terminal.

Horovod calls it as it would call ssh: ``shell SEATS [-o OPTION]... HOST COMMAND``. SEATS is the file that
`hvdrecover.ray.roster` keeps: for each host its seats, in the order of their local ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from hvdrecover import config
from hvdrecover.launch import hidden_environment
from hvdrecover.ray import seat, wire

UNREACHABLE = 255  # the exit code of ssh when it can't do what it is asked for
_LOCAL_RANK = re.compile(r"\bHOROVOD_LOCAL_RANK=(\d+)")
_INTERFACE = re.compile(r"\b(HOROVOD_GLOO_IFACE|NCCL_SOCKET_IFNAME)=\S+")


@dataclass(frozen=True)
class Call:
    """A call of ssh's.

    Attributes:
        host: where to run the command.
        command: for the shell there.
    """

    host: str
    command: str


def parse(words: Sequence[str]) -> Call:
    """Take the arguments of ssh apart; its options, of which each has a value, mean nothing here."""
    rest = list(words)
    host = ""
    while rest and (rest[0].startswith("-") or not host):
        if rest[0].startswith("-"):
            del rest[: 1 if len(rest[0]) > 2 else 2]
        else:
            host = rest.pop(0)
    return Call(host, " ".join(rest))


def chosen(seats: Mapping[str, Any], call: Call) -> dict[str, Any] | None:
    """Return the seat of a command: that of its local rank, else the host's first; None if it is gone."""
    rank = _LOCAL_RANK.search(call.command)
    number = int(rank[1]) if rank else 0
    of_host = seats.get(call.host, [])
    return of_host[number] if number < len(of_host) else None


def adapted(command: str, interface: str) -> str:
    """Return a command that uses the interface that a host has, whatever it is called elsewhere."""
    return _INTERFACE.sub(lambda match: f"{match[1]}={interface}", command)


def script(command: str, environ: Mapping[str, str], devices: Sequence[str]) -> str:
    """Return what the shell of a seat reads: this environment, the host's devices, and the command."""
    # Without the folder in which this program is called ssh: scripts may have use for the real one.
    ours = os.fspath(Path(environ.get("HVDRECOVER_EVENTS", "")) / "bin")
    path = [each for each in environ.get("PATH", os.defpath).split(os.pathsep) if each != ours]
    environ = {**environ, "PATH": os.pathsep.join(path)}
    seen = f"export CUDA_VISIBLE_DEVICES={','.join(devices)}\n" if devices else ""
    return seen + hidden_environment.script(command, environ)


def main() -> None:
    """Run the command; the exit code is the command's, or ssh's if it can't be run."""
    file, *words = sys.argv[1:]
    call = parse(words)
    told = json.loads(Path(file).read_text())
    found = chosen(told["seats"], call)
    if found is None:
        sys.exit(_failed(call.host, "Ray has no such slot there any more"))
    command = adapted(call.command, found["interface"])
    if f" {hidden_environment.MARK}=" in command:
        devices = [each for one in told["seats"][call.host] for each in one["devices"]]
        text = script(command, config.environment(), devices)
        given: IO[bytes] = BytesIO(text.encode(errors="surrogateescape"))
        command = "exec /bin/sh -s"
    else:
        given = sys.stdin.buffer
    try:
        connection = wire.connect(found["address"], found["port"], told["key"].encode())
    except OSError as error:
        sys.exit(_failed(call.host, f"its slot can't be reached: {error.strerror or error}"))
    with connection:
        connection.send_bytes(json.dumps({"command": command}).encode())
        threading.Thread(target=_feed, args=(connection, given), daemon=True).start()
        try:
            os._exit(_show(connection))  # `_feed` may be waiting for input
        except (EOFError, OSError):
            os._exit(_failed(call.host, "its slot is gone"))


def _show(connection: Connection) -> int:
    """Print what comes, and return the exit code, which comes last."""
    while True:
        frame = connection.recv_bytes()
        kind, data = frame[:1], frame[1:]
        if kind == seat.EXIT:
            return int(data)
        while data:
            data = data[os.write(1 if kind == seat.OUTPUT else 2, data) :]


def _feed(connection: Connection, given: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(given.fileno(), 1 << 16) if given is sys.stdin.buffer else given.read():
            connection.send_bytes(data)
        connection.send_bytes(b"")


def _failed(host: str, problem: str) -> int:
    sys.stderr.write(f"{host}: {problem}\n")
    sys.stderr.flush()
    return UNREACHABLE


if __name__ == "__main__":
    main()
