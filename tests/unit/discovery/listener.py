"""Ports that accept connections."""

from __future__ import annotations

import socket
import threading


class Listener:
    """Accepts connections and drops them.

    Attributes:
        port: its port.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self._socket = socket.create_server((address, port))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Accept no more."""
        if self._socket.fileno() >= 0:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._thread.join()
