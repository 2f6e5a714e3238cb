"""Run by Python in a training process before its script is read.

An error in reading the script is reported like later ones. ``import horovod.torch`` gives `hvdrecover.torch`
(`hvdrecover.stand_in`).

`hvdrecover.config`, which it imports, notes the folder for relative paths. It leaves no other trace in the
process, and runs the `sitecustomize` that would have been found without it. It never fails: without it, a
process prints its errors itself, and imports Horovod's modules.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path


def _begin() -> None:
    folder = str(Path(__file__).parent)
    if folder in sys.path:
        sys.path.remove(folder)
    with contextlib.suppress(Exception):
        from hvdrecover import config, stand_in, uncaught

        config.forget_python_path(folder)
        settings = config.read()
        if settings.slot is not None:
            uncaught.report_to(settings.slot[2])
            stand_in.install(settings)
    own = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        sys.modules[__name__] = own
        if error.name != "sitecustomize":
            raise


if __name__ == "sitecustomize":
    _begin()
