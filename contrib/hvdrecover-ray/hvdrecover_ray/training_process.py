"""The program of a training process: it runs the driver's function, and sends the result or the error."""

from __future__ import annotations

import os
import pickle
import traceback
from typing import Any

from hvdrecover import config, error_kinds, heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.heartbeat import Phase
from hvdrecover.state import horovod
from hvdrecover_ray import function_server
from hvdrecover_ray.function_server import DRIVER, ERROR, FUNCTION, RESULT, Message


def main() -> None:
    """Run the driver's function.

    Raises:
        ConfigError: hvdrecover_ray.run did not start this process.
    """
    endpoint = os.environ.get(DRIVER)
    if not endpoint:
        raise ConfigError(DRIVER, "is not set; hvdrecover_ray.run starts this program")
    settings = config.read()
    start = ":".join(map(str, settings.rendezvous or ()))

    def send(kind: str, **facts: Any) -> bytes:
        return function_server.send(endpoint, Message(kind, start, _rank(), settings.host, **facts))

    try:
        function = pickle.loads(send(FUNCTION))
        result = function()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        follows = "StoppedError" in error_kinds.kinds(error)
        send(ERROR, pickled=_pickled(error)[0], text=text, follows=follows)
        raise
    if _rank() <= 0:
        pickled, problem = _pickled(result)
        send(RESULT, pickled=pickled, text=problem)
    heartbeat.enter(Phase.FINISHED)  # a function without a State does not report its end itself


def _rank() -> int:
    """Return the rank of this process. After `hvd.shutdown()`, return the rank of the last rendezvous."""
    rank = horovod.rank()
    return heartbeat.page.rank if rank < 0 else rank


def _pickled(value: object) -> tuple[bytes | None, str]:
    """Return the pickled value and '', or None and the reason why it cannot be pickled."""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(value)
        pickle.loads(pickled)
    except Exception as error:  # the class of the value runs its own code
        return None, f"{type(error).__name__}: {error}"
    return pickled, ""


if __name__ == "__main__":
    main()
