"""The table of Keras's callbacks, compared with the Keras that is installed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import keras
import pytest
from keras.src.callbacks.monitor_callback import MonitorCallback

from hvdrecover.tensorflow.callback_state import KEPT

REFUSED = keras.callbacks.BackupAndRestore
LISTS = keras.callbacks.CallbackList
OF_KERAS = [each for each in vars(keras.callbacks).values() if isinstance(each, type)]
LOOKED_AT = [each for each in (*OF_KERAS, MonitorCallback) if each not in (REFUSED, LISTS)]
# What Keras makes again in each `fit`, or changes back.
LEFT = {
    "Callback": "params _model",
    "MonitorCallback": "min_delta monitor_op",
    "CSVLogger": "append_header writer",
    "EarlyStopping": "",
    "History": "epoch",  # which is kept with it
    "ModelCheckpoint": "_current_epoch",
    "OrbaxCheckpoint": "_current_epoch _async_futures",
    "ProgbarLogger": "seen progbar target verbose epochs _called_in_fit",
    "TensorBoard": "_model _log_write_dir _train_dir _val_dir _writers _should_write_train_graph "
    "_profiler_started _batch_trace_context _is_tracing _should_trace _start_batch _stop_batch "
    "_epoch_start_time _previous_epoch_iterations _train_accumulated_time _batch_start_time "
    "_prev_summary_state _summary_module",
}


def changed_in_a_fit(kind: type) -> set[str]:
    """The attributes of itself that a class's methods set, but for the constructor."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    methods = [each for each in tree.body[0].body if isinstance(each, ast.FunctionDef)]  # type: ignore[attr-defined]
    return {
        node.attr
        for method in methods
        if method.name != "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("kind", LOOKED_AT, ids=lambda kind: kind.__name__)
def test_each_attribute_that_keras_callbacks_change_in_a_fit_is_kept_or_known(kind: Any) -> None:
    names = [base.__name__ for base in kind.__mro__]
    left = {name for base in names for name in LEFT.get(base, "").split()}
    kept = {name for base in names for name in KEPT.get(base, ())}
    assert changed_in_a_fit(kind) - left == changed_in_a_fit(kind) & kept
    assert not kept & left
