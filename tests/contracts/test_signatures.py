"""Our modules in the place of Horovod's take what those take: every public name, method and keyword."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MODULES = {
    "hvdrecover.keras": "horovod.keras",
    "hvdrecover.keras.callbacks": "horovod.keras.callbacks",
    "hvdrecover.keras.elastic": "horovod.keras.elastic",
    "hvdrecover.tensorflow": "horovod.tensorflow",
    "hvdrecover.tensorflow.elastic": "horovod.tensorflow.elastic",
    "hvdrecover.tensorflow.keras": "horovod.tensorflow.keras",
    "hvdrecover.tensorflow.keras.callbacks": "horovod.tensorflow.keras.callbacks",
    "hvdrecover.tensorflow.keras.elastic": "horovod.tensorflow.keras.elastic",
    "hvdrecover.tensorflow.sync_batch_norm": "horovod.tensorflow.sync_batch_norm",
    "hvdrecover.torch": "horovod.torch",
    "hvdrecover.torch.elastic": "horovod.torch.elastic",
    "hvdrecover.torch.elastic.sampler": "horovod.torch.elastic.sampler",
    "hvdrecover.torch.elastic.state": "horovod.torch.elastic.state",
}
"""Module that stands in for Horovod's: Horovod's."""

CLASSES = {
    "hvdrecover.tensorflow.elastic:State": "horovod.common.elastic:State",
    "hvdrecover.torch.elastic.state:State": "horovod.common.elastic:State",
}
"""Classes that Horovod has elsewhere: ours to Horovod's, ``module:name``."""

_POSITION = "horovod.keras and horovod.tensorflow.keras differ; ours is the latter"
DIFFERENT: dict[str, str] = {
    "hvdrecover.keras.callbacks": "hvdrecover.keras is hvdrecover.tensorflow.keras",
    "hvdrecover.keras.callbacks.BestModelCheckpoint(mode)": _POSITION,
    "hvdrecover.keras.callbacks.BestModelCheckpoint(save_freq)": _POSITION,
    "hvdrecover.keras.elastic": "the same",
    **{
        f"hvdrecover.tensorflow.{place}": why
        for place, why in {
            "keras.keras": "keras and tensorflow.keras are one since Keras 3",
            "keras.callbacks.keras": "the same",
        }.items()
    },
    **{
        f"hvdrecover.tensorflow.{place}SyncBatchNormalization.call({taken})": "as Keras's layer has it"
        for place in ("", "sync_batch_norm.")
        for taken in ("*args", "**kwargs", "inputs")
    },
}
"""Place of a difference, as the test names it: why it is right."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def test_each_name_of_horovods_takes_what_horovods_takes_or_is_different_on_purpose() -> None:
    found: list[str] = []
    for ours, horovods in MODULES.items():
        mine, theirs = importlib.import_module(ours), importlib.import_module(horovods)
        found += [
            line for name in public(theirs) for line in differences(f"{ours}.{name}", mine, theirs, name)
        ]
    for ours, horovods in CLASSES.items():
        module, _, name = ours.partition(":")
        mine, theirs = importlib.import_module(module), importlib.import_module(horovods.partition(":")[0])
        found += differences(f"{module}.{name}", mine, theirs, name)
    assert [line for line in found if line.partition(": ")[0] not in DIFFERENT] == []
    assert DIFFERENT.keys() - {line.partition(": ")[0] for line in found} == set()  # so differences are seen


@pytest.mark.parametrize("ours", MODULES)
def test_each_name_that_is_ours_is_in_the_docs(ours: str) -> None:
    mine, theirs = importlib.import_module(ours), importlib.import_module(MODULES[ours])
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    replaced = [name for name in public(theirs) if getattr(mine, name) is not getattr(theirs, name)]
    assert [name for name in replaced if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["hvdrecover", "hvdrecover.discovery", *MODULES])
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in getattr(module, "__all__", ()) if not hasattr(module, each)] == []


def public(holder: Any) -> list[str]:
    return [name for name in dir(holder) if not name.startswith("_")]


def differences(path: str, ours: Any, horovods: Any, name: str) -> list[str]:
    """Return a line for each thing that ours lacks, or takes otherwise than Horovod's."""
    theirs = getattr(horovods, name)
    try:
        mine = getattr(ours, name)
    except AttributeError:
        return [f"{path}: is missing"]
    if mine is theirs:
        return []
    if isinstance(theirs, ModuleType):
        known = isinstance(mine, ModuleType) and MODULES.get(mine.__name__) == theirs.__name__
        return [] if known else [f"{path}: another module than Horovod's, and not one of MODULES"]
    if inspect.isclass(theirs):
        own = [each for each in public(theirs) if is_horovods(theirs, each)]
        lines = [line for each in own for line in differences(f"{path}.{each}", mine, theirs, each)]
        return [*taken(path, mine, theirs), *lines]
    return taken(path, mine, theirs) if callable(theirs) else []


def is_horovods(kind: type, name: str) -> bool:
    """Return whether a class has a name from Horovod, not from a framework's class below it."""
    owner = next(each for each in kind.__mro__ if name in vars(each))
    return owner.__module__.startswith("horovod.")


def taken(path: str, mine: Any, theirs: Any) -> list[str]:
    """Compare two signatures: all of theirs must be taken by ours, and what ours adds must be optional."""
    own, wanted = inspect.signature(mine).parameters, inspect.signature(theirs).parameters
    lines, stars = [], {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for at, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind in stars:
            if parameter.kind not in {each.kind for each in own.values()}:
                lines.append(f"{path}({stars[parameter.kind]}{name}): is not taken")
        elif name not in own:
            lines.append(f"{path}({name}): is not taken")
        elif own[name].default != parameter.default:
            lines.append(f"{path}({name}): {own[name].default} by default, {parameter.default} in Horovod's")
        elif parameter.kind in _POSITIONAL and (
            own[name].kind not in _POSITIONAL or list(own).index(name) != at
        ):
            lines.append(f"{path}({name}): is not at the same place")
    for name, parameter in own.items():
        if name not in wanted and parameter.default is parameter.empty and parameter.kind not in stars:
            lines.append(f"{path}({name}): must be given, and Horovod's has no such argument")
    return lines
