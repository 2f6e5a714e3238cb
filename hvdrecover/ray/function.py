"""A training process of a job on Ray: fetches the driver's function, and brings back what comes of it."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from hvdrecover import config, error_kinds, heartbeat
from hvdrecover.elastic import horovod
from hvdrecover.errors import ConfigError
from hvdrecover.heartbeat import Phase
from hvdrecover.ray import exchange
from hvdrecover.ray.exchange import ERROR, FUNCTION, RESULT, Message


def main() -> None:
    """Run the driver's function.

    Raises:
        ConfigError: no driver has started this process.
    """
    read = config.read()
    if read.exchange is None:
        raise ConfigError("HVDRECOVER_EXCHANGE", "is not set; hvdrecover.ray.run starts this program")
    address, port, key = read.exchange
    start = ":".join(map(str, read.rendezvous or ()))

    def send(kind: str, **facts: Any) -> bytes:
        message = Message(kind, start, _rank(), read.host, **facts)
        return exchange.send(address, port, key.encode(), message)

    try:
        function = pickle.loads(send(FUNCTION))
        result = function()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        hearsay = "StoppedError" in error_kinds.kinds(error)
        send(ERROR, pickled=_pickled(error)[0], text=text, hearsay=hearsay)
        raise
    if _rank() <= 0:
        pickled, problem = _pickled(result)
        send(RESULT, pickled=pickled, text=problem)
    heartbeat.enter(Phase.FINISHED)  # also if the function has trained without a state


def _rank() -> int:
    """Return the rank of this process now, or if it has shut Horovod down, that of its last rendezvous."""
    rank = horovod.rank()
    return heartbeat.read().rank if rank < 0 else rank


def _pickled(value: object) -> tuple[bytes | None, str]:
    """Return a value's bytes, from which it can be made again, or why there are none."""
    import cloudpickle  # Horovod needs it, so it is there

    try:
        pickled: bytes = cloudpickle.dumps(value)
        pickle.loads(pickled)
    except Exception as error:  # whatever the value's class does
        return None, f"{type(error).__name__}: {error}"
    return pickled, ""


if __name__ == "__main__":
    main()
