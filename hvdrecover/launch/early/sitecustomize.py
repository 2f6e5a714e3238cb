"""Run by Python in a training process before its script is read, to report errors and install `stand_in`."""

from __future__ import annotations

# A script that needs neither must not start later for it, so nothing of ours is imported before it is needed.
# This file never fails: without it, a process prints its errors itself, and imports Horovod's modules.
import os
import sys


class _Finder:
    """Installs the stand-in when the script, or a library, imports Horovod."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "horovod":
            return
        sys.meta_path.remove(self)
        try:
            from hvdrecover import config, stand_in

            stand_in.install(config.read())  # Python asks its finder for horovod.torch, which comes next
        except Exception:
            pass  # an invalid setting is reported when hvdrecover is imported


def _report_errors(notes: int) -> None:
    before = sys.excepthook

    def report(*error: object) -> None:
        try:
            from hvdrecover import heartbeat

            sys.excepthook = before
            heartbeat.report_errors_to(notes)
        except Exception:
            pass  # the process prints the error itself
        sys.excepthook(*error)  # type: ignore[arg-type]

    report.before = before  # type: ignore[attr-defined]
    sys.excepthook = report


def _begin() -> None:
    folder = os.path.dirname(__file__)  # noqa: PTH120  pathlib takes milliseconds
    if folder in sys.path:
        sys.path.remove(folder)
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each != folder]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    if slot := os.environ.get("HVDRECOVER_SLOT"):
        try:  # noqa: SIM105  contextlib takes milliseconds, too
            # For `hvdrecover.config`. No variable: programs that the script starts would get it, too.
            sys.hvdrecover_started_in = os.getcwd()  # type: ignore[attr-defined]  # noqa: PTH109
        except OSError:  # the working directory was deleted
            pass
        # The guardian's child leads its process group. A Python that a shell script starts before the
        # training prints its errors itself.
        if os.getpgrp() == os.getpid():
            _report_errors(int(slot.split(",")[2]))
        sys.meta_path.insert(0, _Finder())
    own = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")  # the one that Python would have found without ours
    except ModuleNotFoundError as error:
        sys.modules[__name__] = own
        if error.name != "sitecustomize":
            raise


if __name__ == "sitecustomize":
    _begin()
