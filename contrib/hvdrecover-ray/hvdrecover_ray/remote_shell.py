"""The program that a job calls instead of ssh: it has a slot server run a command, and connects its terminal.

``HVDRECOVER_REMOTE_SHELL="ray SLOTS"`` selects it, by an entry point. Horovod then calls it like ssh:
``remote_shell SLOTS [-o OPTION]... HOST COMMAND``. SLOTS is `hvdrecover_ray.slot_pool.SlotPool.slots_file`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from hvdrecover.launch import ssh
from hvdrecover_ray import connections
from hvdrecover_ray.slot_server import EXIT, OUTPUT

UNREACHABLE = 255  # ssh's own exit code for its errors
_LOCAL_RANK = re.compile(r"\bHOROVOD_LOCAL_RANK=(\d+)")
_INTERFACE = re.compile(r"\b(HOROVOD_GLOO_IFACE|NCCL_SOCKET_IFNAME)=\S+")


def parse(words: Sequence[str]) -> tuple[str, str]:
    """Return host and command of ssh's arguments. Each option has a value, and means nothing here."""
    rest = list(words)
    host = ""
    while rest and (rest[0].startswith("-") or not host):
        if rest[0].startswith("-"):
            del rest[: 1 if len(rest[0]) > 2 else 2]
        else:
            host = rest.pop(0)
    return host, " ".join(rest)


def choose_slot(slots: Sequence[dict[str, Any]], command: str) -> dict[str, Any] | None:
    """Return the slot of the command's local rank, or the first slot; None if the slot is gone."""
    rank = _LOCAL_RANK.search(command)
    number = int(rank[1]) if rank else 0
    return slots[number] if number < len(slots) else None


def use_interface(command: str, interface: str) -> str:
    """Return the command with another network interface: interfaces have different names on each host."""
    return _INTERFACE.sub(lambda match: f"{match[1]}={interface}", command)


def script(command: str, environ: Mapping[str, str], devices: Sequence[str]) -> str:
    """Return a shell script that sets the environment and the host's GPUs, and then runs the command."""
    # In this folder, `ssh` is this program. Training scripts may need the real ssh.
    own = os.fspath(Path(environ.get("HVDRECOVER_EVENTS", "")) / "bin")
    path = [each for each in environ.get("PATH", os.defpath).split(os.pathsep) if each != own]
    environ = {**environ, "PATH": os.pathsep.join(path)}
    visible = f"export CUDA_VISIBLE_DEVICES={','.join(devices)}\n" if devices else ""
    return visible + ssh.script(command, environ)


def main() -> None:
    """Run the command, and exit with its exit code, or with ssh's if the command cannot be run."""
    file, *words = sys.argv[1:]
    host, command = parse(words)
    known = json.loads(Path(file).read_text())
    slots = known["hosts"].get(host, [])
    slot = choose_slot(slots, command)
    if slot is None:
        sys.exit(_failed(host, "Ray no longer has this slot"))
    command = use_interface(command, slot["interface"])
    if f" {ssh.MARK}=" in command:  # this command starts a worker
        devices = [device for each in slots for device in each["devices"]]
        text = script(command, os.environ, devices)
        given: IO[bytes] = BytesIO(text.encode(errors="surrogateescape"))
        command = "exec /bin/sh -s"
    else:
        given = sys.stdin.buffer
    try:
        connection = connections.connect(slot["address"], slot["port"], known["key"].encode())
    except OSError as error:
        sys.exit(_failed(host, f"cannot connect to the slot: {error.strerror or error}"))
    with connection:
        connection.send_bytes(json.dumps({"command": command}).encode())
        threading.Thread(target=_send_input, args=(connection, given), daemon=True).start()
        try:
            os._exit(_write_output(connection))  # `_send_input` may still wait for input
        except (EOFError, OSError):
            os._exit(_failed(host, "the slot is gone"))


def _write_output(connection: Connection) -> int:
    """Write the command's output, and return its exit code."""
    while True:
        frame = connection.recv_bytes()
        kind, data = frame[:1], frame[1:]
        if kind == EXIT:
            return int(data)
        while data:
            data = data[os.write(1 if kind == OUTPUT else 2, data) :]


def _send_input(connection: Connection, given: IO[bytes]) -> None:
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
