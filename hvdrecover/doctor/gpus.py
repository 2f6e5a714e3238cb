"""The health of NVIDIA GPUs, as ``nvidia-smi`` and the kernel's log tell of it.

What the fields mean is in ``nvidia-smi --help-query-gpu``; the bits of the clocks' reasons are in ``nvml.h``;
the meaning of Xid numbers is at https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.discovery import programs
from hvdrecover.doctor import facts
from hvdrecover.doctor.findings import Finding, failure, ok, skipped, warning
from hvdrecover.errors import DiscoveryError

GPUS = "gpus"
_LOG = Path("/dev/kmsg")
_PATIENCE = 20.0  # seconds; without its persistence mode, the driver wakes all GPUs first

# Drivers call the reasons by one of two names, and refuse a question with a name that they don't know.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_FIELDS = (
    "index",
    "name",
    "driver_version",
    "temperature.gpu",
    "memory.total",
    "memory.used",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
    *_REASONS,
)
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
# Reasons for slow clocks that are faults: all others are an idle GPU, or one at the limit of its power.
_SLOWED = {
    0x20: "slowed by the driver, as it is hot",
    0x40: "slowed by the hardware, as it is hot",
    0x80: "slowed by the power supply",
}
_SLOWED_SOMEHOW = 0x08  # is set besides the last two
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+),?\s*(.*)")
# Those that tell of the GPU, its memory or its links, and not of a program.
_OF_HARDWARE = {46, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120}
_RESET = "Reset the GPU (nvidia-smi -r) or restart the host; have the GPU replaced if it comes back."


def look(log: Path = _LOG) -> dict[str, Any] | None:
    """Return what is known of this host's GPUs, as JSON takes it; None if it has none.

    ``gpus``: for each one that this process may use, field to what nvidia-smi says; ``problem``: why it does
    not say it, or empty; ``xids``: the errors in the kernel's log; None if that can't be read.
    """
    if not facts.gpus() and shutil.which("nvidia-smi") is None:
        return None
    problem, gpus = "", []
    try:
        gpus = _asked(list(_FIELDS))
    except DiscoveryError as error:
        problem = error.problem
    return {"gpus": gpus, "problem": problem, "xids": _xids(log)}


def _asked(fields: list[str]) -> list[dict[str, str]]:
    """Ask nvidia-smi, without the fields that it does not know.

    Raises:
        DiscoveryError: it does not answer.
    """
    while True:
        query = f"nvidia-smi --query-gpu={','.join(fields)} --format=csv,noheader,nounits"
        # By a shell, as versions differ in where they complain of what they do not know.
        command = ["sh", "-c", f"{query} 2>&1 || true"]
        told = programs.output(command, config.environment(), _PATIENCE).decode(errors="replace")
        unknown = _UNKNOWN_FIELD.search(told)
        if unknown is None or unknown[1] not in fields:
            return parsed(told, fields)
        fields.remove(unknown[1])


def parsed(told: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Return what nvidia-smi says of each GPU: field to its value.

    Raises:
        DiscoveryError: it says something else.
    """
    rows = [[value.strip() for value in row] for row in csv.reader(told.splitlines()) if row]
    if not rows or any(len(row) != len(fields) for row in rows):
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        raise DiscoveryError("nvidia-smi", lines[0] if lines else "it says nothing")
    return [dict(zip(fields, row, strict=True)) for row in rows]


def _xids(log: Path) -> list[dict[str, Any]] | None:
    """Return the Xid errors that the kernel's log still has, the latest last."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # not for everybody, and not in a container
        return None
    records = b""
    try:
        while piece := os.read(descriptor, 1 << 13):  # a record each; what is longer is refused
            records += piece
    except OSError:
        pass  # no more for now
    finally:
        os.close(descriptor)
    return list(xids(records.decode(errors="replace"), time.clock_gettime(time.CLOCK_BOOTTIME)))


def xids(records: str, now: float) -> Iterator[dict[str, Any]]:
    """Return the Xid errors in records of ``/dev/kmsg``: ``level,number,microseconds,…;text``.

    Args:
        records: a line each.
        now: seconds since the host has started.
    """
    for line in records.splitlines():
        head, _, text = line.partition(";")
        found = _XID.search(text)
        if found:
            since = head.split(",")[2:3]
            age = now - int(since[0]) / 1e6 if since and since[0].isdigit() else None
            yield {"gpu": found[1], "xid": int(found[2]), "text": found[3].strip(), "age": age}


def judge(found: Mapping[str, Mapping[str, Any] | None]) -> list[Finding]:
    """Return what is wrong with GPUs.

    Args:
        found: host to what `look` has found there.
    """
    on = {host: each for host, each in found.items() if each is not None}
    if not on:
        return [skipped(GPUS, "no NVIDIA GPU on any host" if len(found) > 1 else "no NVIDIA GPU")]
    every = {"hosts": dict(found)}
    broken = {host: words for host, each in on.items() if (words := _broken(each))}
    ailing = {host: words for host, each in on.items() if (words := _ailing(each))}
    findings = []
    if broken:
        findings.append(failure(GPUS, _named(broken), _RESET, at_fault=broken, **every))
    if ailing:
        findings.append(warning(GPUS, _named(ailing), _REMEDY, **every))
    return findings or [ok(GPUS, _described(on), **every)]


_REMEDY = (
    "Look at cooling and power where clocks are slowed, and at what else uses a GPU; reset GPUs with errors "
    "(nvidia-smi -r) before the job."
)


def _named(lines: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{host}: {', '.join(words)}" for host, words in lines.items())


def _broken(host: Mapping[str, Any]) -> list[str]:
    """Return why a job can't do its work on a host."""
    if host["problem"]:
        return [f"nvidia-smi: {host['problem']}"]
    words = []
    for gpu in host["gpus"]:
        errors = _number(gpu, "ecc.errors.uncorrected.volatile.total")
        if errors:
            words.append(f"GPU {gpu['index']} has had {errors} memory errors that could not be corrected")
        if gpu.get("remapped_rows.failure") == "Yes":
            words.append(f"GPU {gpu['index']} has no memory left to replace what is faulty")
    return words


def _ailing(host: Mapping[str, Any]) -> list[str]:
    """Return why a job may suffer on a host."""
    words = []
    for gpu in host["gpus"]:
        if "Yes" in (gpu.get("remapped_rows.pending"), gpu.get("retired_pages.pending")):
            words.append(f"GPU {gpu['index']} replaces faulty memory at its next reset")
        reasons = max(_number(gpu, name) for name in _REASONS)
        why = [text for bit, text in _SLOWED.items() if reasons & bit]
        if reasons & _SLOWED_SOMEHOW and not why:
            why = ["slowed by the hardware"]
        words += [f"GPU {gpu['index']} is {each}" for each in why]
        total, used = _number(gpu, "memory.total"), _number(gpu, "memory.used")
        if total and used > total / 10:
            words.append(f"GPU {gpu['index']} has {used} of {total} MiB in use")
    for each in host["xids"] or []:
        if each["xid"] in _OF_HARDWARE:
            ago = "" if each["age"] is None else f" {each['age'] / 3600:.1f} h ago"
            words.append(f"Xid {each['xid']} of {each['gpu']}{ago}: {each['text']}")
    return words


def _number(gpu: Mapping[str, str], name: str) -> int:
    """Return a field's number; 0 if the GPU does not know it, as in ``[N/A]``."""
    try:
        return int(gpu.get(name, ""), 0)
    except ValueError:
        return 0


def _described(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    names: dict[str, int] = {}
    for each in hosts.values():
        for gpu in each["gpus"]:
            names[gpu["name"]] = names.get(gpu["name"], 0) + 1
    unread = [host for host, each in hosts.items() if each["xids"] is None]
    what = ", ".join(f"{count} x {name}" for name, count in names.items())
    logs = f"; the kernel's log can't be read on {', '.join(unread)}" if unread else ""
    return f"{what}: no memory errors, no slowed clocks{logs}"
