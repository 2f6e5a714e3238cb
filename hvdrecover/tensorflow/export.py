"""A commit's model as a ``.keras`` file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import keras

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.inspection import written_aside
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import ExportError, MismatchError
from hvdrecover.state.contents import load
from hvdrecover.tensorflow.framework import TensorFlowFramework


def to_keras(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, model_config: Path, force: bool
) -> list[str]:
    """Write a commit's model to a ``.keras`` file, without its optimizer; every byte is verified.

    Args:
        storage: the root.
        commit: which commit.
        only: the attribute that is the model; empty for ``model``.
        path: the file to write.
        model_config: a file with the text of the model's ``to_json()``, or a ``.keras`` file of it, whose
            weights are not used.
        force: whether to replace the file if it exists.

    Returns:
        The attribute that was exported.
    """
    url = f"{storage.url}/{commit.name}"
    if len(only) > 1:
        raise ExportError(url, f"a .keras file holds one model; name one of {', '.join(only)} with --only")
    name = only[0] if only else "model"
    model = _make(model_config)
    with written_aside(path, force=force) as aside:
        try:
            load(TensorFlowFramework(), storage.url, {name: model}, commit, strict=True)
        except MismatchError as error:
            listing = "".join(f"\n  {line}" for line in error.differences)
            raise ExportError(
                url, f"the commit's '{name}' does not fit the model of {model_config}:{listing}"
            ) from error
        model.save(aside)
    return [name]


def _make(file: Path) -> keras.Model:
    """Make a model without running code of the file's; Keras refuses what would."""
    try:
        if file.suffix == ".keras":
            model = keras.models.load_model(file, compile=False, safe_mode=True)
        else:
            config = {**json.loads(file.read_text()), "compile_config": None}
            model = keras.models.model_from_json(json.dumps(config))
        if not isinstance(model, keras.Model) or not model.built:
            raise TypeError(f"it makes a {type(model).__name__}, and no model that has been built")
    except Exception as error:  # Keras raises all kinds
        reason = str(error).rpartition("Exception encountered: ")[2]  # after a page of the config
        raise ExportError(
            str(file),
            f"no model can be made of it ({textwrap.shorten(reason, 200)}). It has to hold what "
            "model.to_json() gives after model.build(input_shape), or be a .keras file. A model with classes "
            "or lambdas of your own is exported in Python, where they are known: "
            "hvdrecover.tensorflow.load(URL, model=model), then model.save(FILE)",
        ) from error
    return model
