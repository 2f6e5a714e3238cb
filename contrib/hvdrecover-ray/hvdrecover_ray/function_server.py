"""The driver's server: training processes fetch the function from it, and return its result or error.

A training process opens one connection for each message:

1. FUNCTION: the answer is the pickled function.
2. RESULT: rank 0 sends what the function returned; or ERROR: any rank sends what it raised.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hvdrecover.errors import LaunchError
from hvdrecover_ray import connections

DRIVER = "HVDRECOVER_RAY_DRIVER"  # environment variable with the server's endpoint
FUNCTION, RESULT, ERROR = "function", "result", "error"


@dataclass(frozen=True)
class Message:
    """A message of a training process.

    Attributes:
        kind: FUNCTION, RESULT or ERROR.
        start: identifies the present start of the job. A restart of the whole job changes it.
        rank: rank of the sender; -1 if it has none.
        host: host of the sender.
        pickled: the result or error; None if it cannot be pickled.
        text: the traceback of the error, or the reason why the result cannot be pickled.
        follows: whether the error only reports an error of another rank.
    """

    kind: str
    start: str
    rank: int = -1
    host: str = ""
    pickled: bytes | None = None
    text: str = ""
    follows: bool = False


class FunctionServer:
    """The server.

    Attributes:
        endpoint: address, port and key, as ``ADDRESS/PORT:KEY``.

    Args:
        address: address of this host.
        key: key of the job.
        function: the pickled function.
    """

    def __init__(self, address: str, key: str, function: bytes) -> None:
        self._function = function
        self._start = ""
        self._errors: list[Message] = []
        self._result: Message | None = None
        self._listener = connections.serve(address, key.encode(), self._answer)
        self.endpoint = f"{address}/{self._listener.getsockname()[1]}:{key}"

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _answer(self, connection: Connection) -> None:
        message: Message = pickle.loads(connection.recv_bytes())
        if message.kind == FUNCTION and message.start != self._start:
            self._start, self._errors = message.start, []  # the restart repaired the earlier errors
        elif message.kind == RESULT:
            self._result = message
        elif message.kind == ERROR and message.start == self._start:
            self._errors.append(message)
        connection.send_bytes(self._function if message.kind == FUNCTION else b"")

    def result(self) -> Any:
        """Return the result of rank 0.

        Raises:
            LaunchError: the result did not come, or cannot be pickled.
        """
        message = self._result
        if message is None:
            problem = "is missing, although training finished: the host of rank 0 was lost with it"
            raise LaunchError("result of rank 0", f"{problem}. The last commit has the state")
        if message.pickled is None:
            problem = f"cannot be pickled: {message.text}. Return a value that can be pickled"
            raise LaunchError("result of rank 0", problem)
        return pickle.loads(message.pickled)

    def error(self) -> BaseException | None:
        """Return the error that ended the job, with the traceback as its cause; None if no rank sent one."""
        errors = [each for each in self._errors if not each.follows] or self._errors
        if not errors:
            return None
        message = errors[-1]
        cause = LaunchError(f"rank {message.rank} on {message.host}", f"\n{message.text}")
        try:
            error: BaseException = pickle.loads(message.pickled or b"")
        except Exception:  # unpickling runs code of the script
            return cause
        error.__cause__ = cause
        return error


def send(endpoint: str, message: Message) -> bytes:
    """Send a message from a training process, and return the answer.

    Raises:
        OSError: the driver cannot be reached.
    """
    place, _, key = endpoint.rpartition(":")
    address, _, port = place.partition("/")
    with connections.connect(address, int(port), key.encode()) as connection:
        connection.send_bytes(pickle.dumps(message))
        return connection.recv_bytes()
