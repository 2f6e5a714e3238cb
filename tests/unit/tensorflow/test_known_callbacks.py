"""The table of Keras's callbacks, compared with the Keras that is installed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import keras
import pytest
from keras.src.callbacks.monitor_callback import MonitorCallback

from hvdrecover.tensorflow.known_callbacks import KNOWN

REFUSED = keras.callbacks.BackupAndRestore
LISTS = keras.callbacks.CallbackList
OF_KERAS = [each for each in vars(keras.callbacks).values() if isinstance(each, type)]
LOOKED_AT = [each for each in (*OF_KERAS, MonitorCallback) if each not in (REFUSED, LISTS)]


def attributes(kind: type) -> set[str]:
    """The attributes of itself that a class's methods set, those of its callback's model left aside."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("kind", LOOKED_AT, ids=lambda kind: kind.__name__)
def test_each_attribute_of_keras_callbacks_is_named(kind: Any) -> None:
    bases = [KNOWN[base.__name__] for base in kind.__mro__[1:] if base.__name__ in KNOWN]
    inherited = {name for base in bases for name in (*base.kept, *base.left)}
    known = KNOWN[kind.__name__]
    named = {*known.kept, *known.left}
    assert attributes(kind) - inherited == named - inherited
    assert not set(known.kept) & set(known.left)


def test_no_class_is_missing_and_none_is_of_another_keras() -> None:
    assert set(KNOWN) == {each.__name__ for each in LOOKED_AT}
    assert keras.callbacks.EarlyStopping in LOOKED_AT
