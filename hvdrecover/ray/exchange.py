"""The driver's end of what its training processes fetch and bring: the function, its result, its errors."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hvdrecover.errors import LaunchError
from hvdrecover.ray import wire

FUNCTION, RESULT, ERROR = "function", "result", "error"


@dataclass(frozen=True)
class Message:
    """A message of a training process.

    Attributes:
        kind: one of the above.
        start: what tells the present start of the job from others.
        rank: the rank of who sends it; -1 if it has none.
        host: its host.
        pickled: a result or an error; None if it could not be pickled.
        text: the traceback of an error, or why a result could not be pickled.
        hearsay: whether it is only what another rank's error has led to.
    """

    kind: str
    start: str
    rank: int = -1
    host: str = ""
    pickled: bytes | None = None
    text: str = ""
    hearsay: bool = False


class Exchange:
    """The exchange.

    Args:
        address: of this host.
        key: what the training processes know.
        function: what they run, pickled.
    """

    def __init__(self, address: str, key: bytes, function: bytes) -> None:
        self._function = function
        self._start = ""
        self._errors: list[Message] = []
        self._result: Message | None = None
        self._listener = wire.serve(address, key, self._answer)
        self.place = f"{address}/{self._listener.getsockname()[1]}:{key.decode()}"

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _answer(self, connection: Connection) -> None:
        message: Message = pickle.loads(connection.recv_bytes())
        if message.kind == FUNCTION and message.start != self._start:
            self._start, self._errors = message.start, []  # those of earlier starts have been repaired
        elif message.kind == RESULT:
            self._result = message
        elif message.kind == ERROR and message.start == self._start:
            self._errors.append(message)
        connection.send_bytes(self._function if message.kind == FUNCTION else b"")

    def result(self) -> Any:
        """The result of rank 0.

        Raises:
            LaunchError: there is none, or it can't be handed over.
        """
        told = self._result
        if told is None:
            problem = "has not come, though the training is finished: its host was lost with it"
            raise LaunchError("the result of rank 0", f"{problem}. The last commit has the state")
        if told.pickled is None:
            raise LaunchError("the result of rank 0", f"can't be pickled: {told.text}; return what can be")
        return pickle.loads(told.pickled)

    def error(self) -> BaseException | None:
        """The error of the training function that has ended the job; its cause has the traceback."""
        own = [each for each in self._errors if not each.hearsay] or self._errors
        if not own:
            return None
        told = own[-1]
        cause = LaunchError(f"rank {told.rank} on {told.host}", f"\n{told.text}")
        try:
            error: BaseException = pickle.loads(told.pickled or b"")
        except Exception:  # whatever unpickling runs
            return cause
        error.__cause__ = cause
        return error


def send(address: str, port: int, key: bytes, message: Message) -> bytes:
    """Send a message from a training process, and return the answer.

    Raises:
        OSError: the driver can't be reached.
    """
    with wire.connect(address, port, key) as connection:
        connection.send_bytes(pickle.dumps(message))
        return connection.recv_bytes()
