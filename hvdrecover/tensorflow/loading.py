"""Loading a commit outside a job: for inference, fine-tuning or a look at it."""

from __future__ import annotations

from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.state import loading
from hvdrecover.state.loading import Loaded
from hvdrecover.tensorflow.building import build_optimizer, refuse_unbuilt
from hvdrecover.tensorflow.framework import TensorFlowFramework


def load(
    url: str,
    *,
    model: Any = None,
    optimizer: Any = None,
    commit: str | int | CommitId | None = None,
    strict: bool = True,
    **attributes: Any,
) -> Loaded:
    """Load a commit into what is handed in, and into nothing else. Horovod need not be initialised.

    Only the files of these attributes are read, and every byte of them is verified. The root is left as it
    is, but for a small lease that is there meanwhile; so this may be done beside the job.

    Args:
        url: the checkpoint root: a path or an fsspec URL.
        model: the model that was ``model`` in the state; it must have been built.
        optimizer: the optimizer that was ``optimizer`` in the state. One that has no slots yet gets those of
            the model that is handed in with it.
        commit: its name, such as ``"g0003-c00000120"``, or its number; None takes the newest that verifies,
            and warns of each that it passes over.
        strict: whether what is handed in must fit the commit exactly. If not, what fits is loaded, and the
            rest is warned of.
        attributes: more models, optimizers, lists of variables and so on, by the names that they had in the
            state.

    Raises:
        ConfigError: nothing was handed in, something that can't be loaded into, such as a model that has not
            been built, or the URL can't be opened.
        UnknownCommitError: the root holds no such commit, or is not a checkpoint root.
        MismatchError: something does not fit. Nothing was loaded.
        CorruptCheckpointError: the commit that was asked for is damaged. Nothing was loaded.
        NoUsableCommitError: none was asked for, and all are damaged. Nothing was loaded.
        FormatVersionError: the commit was written in a newer format.
        StorageError: the storage failed.

    Examples:
        >>> loaded = recover.load("s3://bucket/run-1", model=model)  # doctest: +SKIP
        >>> loaded.objects["epoch"]  # doctest: +SKIP
        12
    """
    given = {"model": model, "optimizer": optimizer, **attributes}
    refuse_unbuilt("model", model)
    build_optimizer(optimizer, model)
    for name, value in given.items():
        refuse_unbuilt(name, value)
    return loading.load(TensorFlowFramework(), url, given, commit, strict=strict)
