"""A seat: a small server in the place of sshd, which runs commands for as long as an actor of Ray's lives.

Started by the actor, whose resources the commands use. It ends when its input does, so with the actor,
whatever has killed that; and what it has started ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import IO

from hvdrecover import config
from hvdrecover.launch import processes
from hvdrecover.ray import wire

OUTPUT, ERRORS, EXIT = b"1", b"2", b"x"  # first bytes of what a seat sends
_PARTING = 5.0  # seconds for a command to end whose caller is gone
_REST = 1.0  # seconds for output that a command's own processes hold back


class Session:
    """One command, and the connection of who has asked for it.

    Args:
        connection: gives the command, and then its input; an empty frame ends that.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._reaping = threading.Lock()
        self._over = threading.Event()
        # The kernel ends it with this thread, which stays until its end.
        self._child = processes.start(
            ["/bin/sh", "-c", json.loads(connection.recv_bytes())["command"]],
            config.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self) -> None:
        """Run the command to its end, or until its caller is gone."""
        child = self._child
        outputs = ((child.stdout, OUTPUT), (child.stderr, ERRORS))
        pumps = [threading.Thread(target=self._pump, args=each, daemon=True) for each in outputs]
        for thread in (*pumps, threading.Thread(target=self._feed, daemon=True)):
            thread.start()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        for pump in pumps:
            pump.join(_REST)
        with self._reaping:
            code = child.wait()
        self._over.set()
        self._send(EXIT, str(processes.exit_code(code)).encode())

    def _send(self, kind: bytes, data: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # `_feed` notices that nobody is there
            self._connection.send_bytes(kind + data)

    def _pump(self, output: IO[bytes], kind: bytes) -> None:
        while data := os.read(output.fileno(), 1 << 16):
            self._send(kind, data)

    def _feed(self) -> None:
        assert self._child.stdin is not None
        try:
            while data := self._connection.recv_bytes():
                with contextlib.suppress(BrokenPipeError):  # the command does not read
                    self._child.stdin.write(data)
                    self._child.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
            self._connection.recv_bytes()  # nothing comes any more but the end
        except (EOFError, OSError):
            self._hang_up()

    def _hang_up(self) -> None:
        """End the command, as when a terminal is closed."""
        self._signal(signal.SIGHUP)
        self._over.wait(_PARTING)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._reaping:
            if self._child.returncode is None:  # its group's number is its own until then
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, number)


def main() -> None:
    """Serve, at the address that is this process's argument, until the end of the input."""
    key = sys.stdin.readline().strip().encode()
    listener = wire.serve(sys.argv[1], key, lambda connection: Session(connection).run())
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
