"""The slot server: it runs commands for a job, as sshd does elsewhere, for as long as the slot's actor lives.

The actor starts it, so commands use the actor's resources. The server ends when its input ends, and the
system closes that input when the actor dies. All commands end with the server.

One connection runs one command:

1. The client sends ``{"command": …}`` as JSON, then the input of the command. An empty frame ends the input.
2. The server sends frames that start with OUTPUT or ERRORS, and at last EXIT with the exit code.
3. If the client closes the connection, the command gets SIGHUP and, five seconds later, SIGKILL.
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

from hvdrecover.launch import processes
from hvdrecover_ray import connections

OUTPUT, ERRORS, EXIT = b"1", b"2", b"x"  # first bytes of the frames that a server sends
_HANGUP_SECONDS = 5.0  # for a command to end after SIGHUP
_OUTPUT_SECONDS = 1.0  # for the rest of the output, which processes started by the command may hold open


class Session:
    """One command and its connection.

    Args:
        connection: the client's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._reaping = threading.Lock()
        self._ended = threading.Event()
        # The kernel kills the command when this thread ends; the thread waits for the command.
        self._child = processes.start(
            ["/bin/sh", "-c", json.loads(connection.recv_bytes())["command"]],
            os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self) -> None:
        """Run the command until it ends, or until the client closes the connection."""
        child = self._child
        outputs = ((child.stdout, OUTPUT), (child.stderr, ERRORS))
        readers = [threading.Thread(target=self._send_output, args=each, daemon=True) for each in outputs]
        for thread in (*readers, threading.Thread(target=self._receive_input, daemon=True)):
            thread.start()
        # Do not reap the command yet: until then, nothing else can have its number.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        for reader in readers:
            reader.join(_OUTPUT_SECONDS)
        with self._reaping:
            code = child.wait()
        self._ended.set()
        self._send(EXIT, str(processes.exit_code(code)).encode())

    def _send(self, kind: bytes, data: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # `_receive_input` notices that the client is gone
            self._connection.send_bytes(kind + data)

    def _send_output(self, output: IO[bytes], kind: bytes) -> None:
        while data := os.read(output.fileno(), 1 << 16):
            self._send(kind, data)

    def _receive_input(self) -> None:
        assert self._child.stdin is not None
        try:
            while data := self._connection.recv_bytes():
                with contextlib.suppress(BrokenPipeError):  # the command does not read its input
                    self._child.stdin.write(data)
                    self._child.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
            self._connection.recv_bytes()  # waits until the client closes the connection
        except (EOFError, OSError):
            self._signal(signal.SIGHUP)
            self._ended.wait(_HANGUP_SECONDS)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._reaping:
            if self._child.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._child.pid, number)


def main() -> None:
    """Serve at the address in the first argument. The first line of the input is the key."""
    key = sys.stdin.readline().strip().encode()
    listener = connections.serve(sys.argv[1], key, lambda connection: Session(connection).run())
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
