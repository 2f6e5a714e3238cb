"""The launcher of dlrover 0.6.1, with the one argument more that torch's `SubprocessHandler` takes by now."""

from __future__ import annotations

from typing import Any

from dlrover.trainer.torch import elastic_run

_given = elastic_run.SubprocessHandler


def _handler(*arguments: Any) -> Any:
    return _given(*arguments, None)


if __name__ == "__main__":
    elastic_run.SubprocessHandler = _handler
    elastic_run.main()
