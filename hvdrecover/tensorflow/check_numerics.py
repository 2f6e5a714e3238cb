"""Errors of ``tf.debugging.check_numerics`` and ``enable_check_numerics``, made all ranks' business.

They raise on the rank that finds the number, before its gradients are there; the others would wait for these.
So that rank takes part with gradients that are not finite, and then all decide, as about any bad step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.python.debug.lib import check_numerics_callback

from hvdrecover.elastic.guard.judge import Judge, RolledBack
from hvdrecover.errors import NumericsError
from hvdrecover.tensorflow.blank_gradients import sent
from hvdrecover.tensorflow.own_gradients import Gradient

_KIND = re.compile(r"(?P<words>[^\n]*?) ?: Tensor had (?P<kind>[^\n]*?) values")
_OUTPUT = re.compile(r"!!! Detected Infinity or NaN in (output \d+) of [\w-]+ op (\"\w+\")")
_NODE = re.compile(r"Detected at node (\S+?)(?:/CheckNumerics\w*)? defined at")
_USER_LINE = re.compile(r"^    \+ (\S+) \((L\d+)\) (\S+)\n -> \|", re.MULTILINE)
_NOT_THE_USERS = ("packages/", "hvdrecover/tensorflow/")
_REDUCED = "gradients of all ranks"
_OF_OTHERS = ('of op "Horovod', f'in "{_REDUCED}"')


def stop_at(gradients: list[Gradient]) -> list[Gradient]:
    """Reduced gradients; with ``enable_check_numerics`` nothing is made of them unless they are finite.

    In a graph it checks each operation while others continue with the result. A rank that fails by what
    others have sent could then name any operation, as if it were to blame.
    """
    if not hasattr(check_numerics_callback._state, "check_numerics_callback"):
        return gradients
    return [
        each if each is None else tf.nest.map_structure(_stop_at, each, expand_composites=True)
        for each in gradients
    ]


def _stop_at(tensor: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(tensor, _REDUCED) if tensor.dtype.is_floating else tensor


def found_by(error: BaseException) -> str:
    """Return what TensorFlow's check has found, in words; empty if the error is none of its."""
    text = str(error)
    if not isinstance(error, tf.errors.InvalidArgumentError) or (kind := _KIND.search(text)) is None:
        return ""
    output, node = _OUTPUT.search(text), _NODE.search(text)
    where = f"{output[1]} of op {output[2]}" if output else f'"{kind["words"].split("}} ")[-1].strip()}"'
    places = [f"node {node[1]}"] if output and node else []
    lines = [line for line in _USER_LINE.findall(text) if not any(part in line[0] for part in _NOT_THE_USERS)]
    if lines:
        path, line, function = lines[-1]
        places.append(f"{path} ({line}) {function}")
    at = f" ({', '.join(places)})" if places else ""
    return f"{kind['kind']} in {where}{at}, says check_numerics"


def verdict_on(error: BaseException, judge: Judge, *, alone: bool) -> BaseException:
    """Return what an error that ended the training function comes to.

    Args:
        error: the error.
        judge: what is done about numbers that are not finite.
        alone: whether there are no other ranks.

    Returns:
        What all ranks have decided, if the error is one of TensorFlow's check; else the error, as when it is
        not known what the others wait for. If ranks were lost meanwhile, the error that came of it.
    """
    found = found_by(error)
    if not found or not (alone or sent.knows):
        return error
    mine = True
    try:
        if not alone:
            sent.release()
            befores = sent.settle()
            mine = _is_origin(befores, judge.rank) and not any(each in found for each in _OF_OTHERS)
        judge.reported(found, here=mine)
    except (NumericsError, RolledBack) as verdict:
        judge.take_verdict()
        return verdict
    except Exception as failure:
        return failure
    return error


def _is_origin(befores: Sequence[Mapping[str, int]], rank: int) -> bool:
    """Return whether a rank has failed by itself, and not by what another has then sent.

    Those that have were the first to take part in nothing more.
    """
    newest = {name: max(each.get(name, 0) for each in befores) for before in befores for name in before}
    behind = [any(each.get(name, 0) < count for name, count in newest.items()) for each in befores]
    return behind[rank] or not any(behind)
