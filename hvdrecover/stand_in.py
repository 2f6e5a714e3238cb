"""Modules that stand in for Horovod's. Names that they do not define come from Horovod's modules.

A script imports them by our name, or, in a job of `hvdrecover run`, by Horovod's (`install`):

1. The script, or a library of it, imports ``horovod.torch``. Python asks our finder for the module first.
2. The finder imports ``hvdrecover.torch`` and its parts. They import Horovod's modules and keep them.
3. The finder puts ours into Python's table of modules, under Horovod's names. Submodules that have no
   counterpart here, such as ``horovod.torch.mpi_ops``, stay Horovod's.
4. With TensorFlow's modules, it has Keras's ``fit`` resume after faults (`hvdrecover.tensorflow.plain_fit`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hvdrecover.config import Config

# Our modules that replace Horovod's modules of the same names, in the order of their imports.
_FAMILIES = {
    "torch": ("torch", "torch.elastic", "torch.elastic.state", "torch.elastic.sampler"),
    "tensorflow": (
        *("tensorflow", "tensorflow.elastic", "tensorflow.sync_batch_norm"),
        *("tensorflow.keras", "tensorflow.keras.callbacks", "tensorflow.keras.elastic"),
        *("keras", "keras.callbacks", "keras.elastic"),
    ),
}
# The modules by which scripts get at a family; Python imports these before any submodule.
_FIRST = {"horovod.torch": "torch", "horovod.tensorflow": "tensorflow", "horovod.keras": "tensorflow"}


replaced: list[str] = []
"""The modules of Horovod's by which this process has got ours; a standby has to import them first."""


def standing_in(
    horovods: ModuleType, ours: Mapping[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module that adds its ``globals()`` to Horovod's names."""

    def find(name: str) -> Any:
        try:
            return getattr(horovods, name)
        except AttributeError:
            message = f"neither {ours['__name__']} nor {horovods.__name__} has an attribute '{name}'"
            raise AttributeError(message) from None

    def names() -> list[str]:
        return sorted({*ours, *dir(horovods)})

    return find, names


def install(settings: Config) -> None:
    """Make this process import our modules under Horovod's names, unless the user wants Horovod's own."""
    if not settings.no_stand_in:
        sys.meta_path.insert(0, _Finder(settings))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._tells = settings.is_first_of_host and settings.log in ("debug", "info") and not settings.rejoins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        family = _FIRST.get(fullname)
        # A script that imports `hvdrecover.torch` itself means Horovod's when it says `horovod.torch`.
        if family is None or f"hvdrecover.{family}" in sys.modules:
            return None  # also while step 2 imports Horovod's modules
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        family = _FIRST[name]
        del sys.modules[name]  # the import under way takes the module that stands there in the end
        ours = {each: importlib.import_module(f"hvdrecover.{each}") for each in _FAMILIES[family]}
        for each, replacement in ours.items():
            _replace(f"horovod.{each}", replacement)
        replaced.append(name)
        if family == "tensorflow" and not self._settings.no_fit:
            importlib.import_module("hvdrecover.tensorflow.plain_fit").install(self._settings)
        if self._tells:  # the script has not set up logging yet
            line = f"{name} is hvdrecover's in this job; with --no-stand-in, it is Horovod's"
            print(f"hvdrecover: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _replace(name: str, ours: ModuleType) -> None:
    """Put a module that has all attributes of ours into the place of Horovod's."""
    horovods = sys.modules[name]
    new = ModuleType(name, ours.__doc__)
    # If Horovod's is a package, this is one in the same folder, so Python finds the other submodules.
    for attribute in ("__spec__", "__loader__", "__package__", "__file__", "__path__"):
        if hasattr(horovods, attribute):
            setattr(new, attribute, getattr(horovods, attribute))
    public = [attribute for attribute in dir(ours) if not attribute.startswith("_")]
    for attribute in public:
        setattr(new, attribute, getattr(ours, attribute))
    new.__all__ = getattr(horovods, "__all__", public)  # type: ignore[attr-defined]  # `import *`
    new.__getattr__ = lambda attribute: getattr(ours, attribute)  # type: ignore[method-assign]
    sys.modules[name] = new
    parent, _, child = name.rpartition(".")
    if parent == "horovod":  # for ours, the parents of the others stay Horovod's modules
        setattr(sys.modules[parent], child, new)
