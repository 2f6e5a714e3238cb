"""The start of a process: done as soon as its script imports an adapter, before ``hvd.init()``."""

from __future__ import annotations

import faulthandler
import signal
import sys
from contextlib import suppress
from typing import Any

from hvdrecover import config as configs
from hvdrecover import heartbeat, uncaught
from hvdrecover.elastic.horovod import rendezvous_alone
from hvdrecover.elastic.lifecycle import early
from hvdrecover.libraries import is_library


def join(hvd: Any) -> None:
    """Choose Horovod's controller, make this process known to its guardian, and take a lost one's place.

    Args:
        hvd: the Horovod module of the adapter.
    """
    config = configs.read()
    configs.choose_controller(config)
    if config.slot is not None and not heartbeat.watched():
        _attach(*config.slot)
    if config.rejoins and not hvd.is_initialized():
        rendezvous_alone(hvd)
    if config.elastic:
        early.begin(hvd, config)


def _attach(page: int, stacks: int, notes: int, events: int) -> None:
    with suppress(ValueError):  # outside the main thread
        # What stands when the interpreter has ended: by default, the signal would kill the process there.
        signal.signal(configs.STACKS_SIGNAL, signal.SIG_IGN)
    try:
        faulthandler.register(configs.STACKS_SIGNAL, file=stacks, all_threads=True)
        heartbeat.attach(page, notes, events)
    except (OSError, ValueError):  # not handed down: something in between has closed what it did not know
        return
    configs.keep_to_this_process(page, stacks, notes, events)
    uncaught.report_to(notes)
    heartbeat.at_commit(_report_modules)


def _report_modules() -> None:
    """At the second commit, report which libraries are imported, so that a standby can import them, too.

    By then the first has been made, which imports some itself.
    """
    if heartbeat.commits() < 2:
        heartbeat.at_commit(_report_modules)
    else:
        heartbeat.notify(modules=[name for name, module in sys.modules.items() if _is_library(name, module)])


def _is_library(name: str, module: Any) -> bool:
    """Return whether a module can be imported before the script runs: it is not part of the script."""
    spec = getattr(module, "__spec__", None)
    if spec is None or name == "__main__":
        return False
    return spec.origin in ("built-in", "frozen") or is_library(str(spec.origin))
