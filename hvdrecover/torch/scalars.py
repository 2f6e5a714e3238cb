"""Scalars for TensorBoard, written by ``torch.utils.tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hvdrecover.errors import ConfigError

FLUSH_SECONDS = 10
QUEUE = 1000  # events, before a step waits for the file system


class TorchWriter:
    """A TensorBoard run; see `hvdrecover.elastic.interfaces.Writer`.

    Args:
        folder: path or URL of the run.
        first: TensorBoard drops this step and later ones of earlier files.
    """

    def __init__(self, folder: str, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder, purge_step=first, max_queue=QUEUE, flush_secs=FLUSH_SECONDS)

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write the scalars of a step as one event: ``add_scalar`` takes 40 times as long."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        each = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=each), step, time)

    def close(self) -> None:
        """Write all to the file and close it."""
        self._writer.close()


def require_tensorboard() -> None:
    """Import now what takes seconds later.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard", "the package tensorboard, which writes its logs, is not installed; pip install it"
        )
    import torch.utils.tensorboard  # noqa: F401
