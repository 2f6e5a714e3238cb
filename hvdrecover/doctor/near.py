"""The near roots on hosts, and the judgement of whether there is room for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.checkpoint.near import place, room
from hvdrecover.checkpoint.near.room import Room
from hvdrecover.doctor.findings import Finding, ok, skipped, warning

NEAR = "near tier"
_SHOWN = 3  # near roots of a host; programs are told of all


def look(checkpoint: str | None) -> dict[str, Any] | None:
    """Return what there is on this host, as JSON takes it; None where the tier is turned off.

    Args:
        checkpoint: the checkpoint root of the job to come, or None; its near root may be taken over.

    Raises:
        StorageError: the user's folder is another's, or others may write to it.
        OSError: the file system can't be read.
    """
    near = config.read().near
    if near == "off":
        return None
    own = None if checkpoint is None else place.folder(near, place.named(checkpoint))
    found = place.roots(near)
    top = place.base(near)
    return {
        "folder": str(top),
        "room": asdict(room.look(next(each for each in top.parents if each.is_dir()))),
        "held": sum(each.nbytes for each in found if each.path == own and not each.in_use),
        "roots": [
            {
                "path": str(each.path),
                "url": each.url,
                "bytes": each.nbytes,
                "used": each.used,
                "in_use": each.in_use,
            }
            for each in found
        ],
    }


def judge(found: Mapping[str, Mapping[str, Any] | None], state: int | None, now: float) -> Finding:
    """Return what near roots there are, and whether another one fits.

    Args:
        found: host to what `look` has found there.
        state: size of the training state in bytes, or None if the user has not said.
        now: seconds since the Unix epoch.
    """
    on = {host: each for host, each in found.items() if each is not None}
    if not on:
        return skipped(NEAR, "HVDRECOVER_NEAR is off")
    there = [each for host, one in on.items() for each in _described(host, one["roots"], now)]
    facts = {"hosts": dict(found), "state_bytes": state}
    if state is None:
        rooms = ", ".join(f"{room.size(_largest(each))} on {host}" for host, each in on.items())
        return ok(NEAR, "; ".join([f"there is room for states of {rooms}", *there]), **facts)
    refused = {host: room.refusal(Room(**each["room"]), state, each["held"]) for host, each in on.items()}
    problems = [
        f"{host}: {problem}, so it would be off" for host, problem in refused.items() if problem is not None
    ]
    if not problems:
        fits = f"{room.SLOTS} commits of {room.size(state)} fit on every host"
        return ok(NEAR, "; ".join([fits, *there]), **facts)
    tops = ", ".join(sorted({str(Path(each["folder"]).parent) for each in on.values()}))
    remedy = (
        f"Give {tops} more room (in a container: --shm-size), delete what is left over with `hvdrecover "
        "prune --near`, or name a folder on a local disk with HVDRECOVER_NEAR."
    )
    return warning(NEAR, "; ".join([*problems, *there]), remedy, **facts)


def _largest(each: Mapping[str, Any]) -> int:
    return room.largest(Room(**each["room"]), each["held"])


def _described(host: str, roots: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """Return a few words on each near root of a host; on the largest ones, if there are many."""
    largest = sorted(roots, key=lambda root: -root["bytes"])
    lines = [_line(host, root, now) for root in largest[:_SHOWN]]
    rest = largest[_SHOWN:]
    if rest:
        kept = sum(root["in_use"] for root in rest)
        nbytes = room.size(sum(root["bytes"] for root in rest))
        lines.append(f"{host}: {len(rest)} more, {nbytes}, {kept} of them in use")
    return lines


def _line(host: str, root: Mapping[str, Any], now: float) -> str:
    about = f"{host}: {root['path']} of {root['url'] or 'an unknown root'}, {room.size(root['bytes'])}"
    if root["in_use"]:
        return f"{about}, in use"
    return f"{about}, left over for {max(0.0, now - root['used']) / 3600:.1f} h"
