"""Checks that a checkpoint root can take commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdrecover.checkpoint.inspection.catalog import WHOLE
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.doctor.findings import Finding, failure, ok, skipped, warning

ROOT = "checkpoint root"
WRITING = "root: writing"
CREATING = "root: claims"
_SPACE = "root: space"
_SHARED = "root: shared"
CLEANING = "root: cleaning"
# What is kept by default, and one more while it is written.
COMMITS = Keep().last + 1


def judge_root(found: Mapping[str, Any], now: float) -> Finding:
    """Return what the root holds, as `hvdrecover.doctor.probing.Probe.look` tells it."""
    url, counts, newest = found["url"], found["commits"], found["newest"]
    facts = {key: found[key] for key in ("url", "commits", "newest", "claim")}
    if not counts:
        claimed = f", and claimed by generation {found['claim']}" if found["claim"] else ""
        return ok(ROOT, f"{url}: no commits yet{claimed}", **facts)
    others = {state: count for state, count in counts.items() if state not in WHOLE}
    listed = ", ".join(f"{count} {state}" for state, count in counts.items())
    if newest is None:
        remedy = f"Look at it with `hvdrecover verify {url}`, and repair it or name another root."
        return failure(ROOT, f"{url}: none of its commits can be used: {listed}", remedy, **facts)
    minutes = max(0.0, now - newest["time"]) / 60
    what = f"{url}: {listed}; a job resumes from {newest['commit']}, which is {minutes:.0f} min old"
    if bad := [state for state in others if state != "incomplete"]:
        remedy = (
            f"Look at it with `hvdrecover ls {url}`; the commits that are {' or '.join(bad)} are passed over."
        )
        return warning(ROOT, what, remedy, **facts)
    return ok(ROOT, what, **facts)


def judge_writing(found: Mapping[str, Any], host: str) -> Finding:
    """Return whether what is written is what is read, as `Probe.try_writing` tells it, and how fast."""
    speeds = {name: found["bytes"] / found[f"{name}_seconds"] for name in ("write", "read")}
    facts = {"host": host, "bytes": found["bytes"], "bytes_per_second": speeds}
    if not found["same"]:
        remedy = "Don't keep commits there; look for a fault of the disk, the server or the network."
        return failure(WRITING, f"{host} reads other bytes than it has written", remedy, **facts)
    shown = ", ".join(f"{name} {speed / 1e6:.0f} MB/s" for name, speed in speeds.items())
    return ok(
        WRITING, f"{found['bytes'] / 1e6:.0f} MB written by {host} and read back the same: {shown}", **facts
    )


def judge_creating(found: Mapping[str, Any]) -> Finding:
    """Return whether one file can be created by one process only, as `Probe.try_creating` tells it."""
    if found["winners"] == 1 and found["whole"] and found["kept"]:
        what = f"of {found['rivals']} that created one file at once, one did; so only one job can write"
        return ok(CREATING, what, **found)
    what = (
        f"of {found['rivals']} that created one file at once, {found['winners']} were told it is theirs; "
        f"it was {'left alone' if found['kept'] else 'replaced'} afterwards"
    )
    remedy = "Use a storage with conditional writes: S3, Azure, GCS, SFTP, POSIX."
    return failure(CREATING, what, remedy, **found)


def judge_space(free: int | None, state: int | None) -> Finding:
    """Return whether the root has room for what is kept.

    Args:
        free: bytes, or None if the storage can't tell.
        state: size of the training state in bytes, or None if the user has not said.
    """
    facts: dict[str, Any] = {"bytes_free": free, "state_bytes": state}
    if free is None:
        return skipped(_SPACE, "this storage does not tell", **facts)
    if state is None:
        what = f"{free / 1e9:.3g} GB free, for commits of up to {free / COMMITS / 1e9:.3g} GB"
        return ok(_SPACE, f"{what}: {COMMITS} are there at a time by default", **facts)
    what = f"{free / 1e9:.3g} GB free for commits of {state / 1e9:.3g} GB"
    remedy = "Free space, keep fewer commits (Checkpoint(keep=...)), or name a larger root."
    if free < state:
        return failure(_SPACE, f"{what}: not even one fits", remedy, **facts)
    if free < COMMITS * state:
        return warning(_SPACE, f"{what}, of which {COMMITS} are there at a time by default", remedy, **facts)
    return ok(_SPACE, what, **facts)


def judge_shared(seen: Mapping[str, bool | str], writer: str) -> Finding:
    """Return whether other hosts see what one writes, as rank 0 may move to any of them.

    Args:
        seen: host to whether it does, or to what is wrong there.
        writer: the host that has written.
    """
    if not seen:
        return skipped(_SHARED, "this is the only host")
    facts = {"writer": writer, "hosts": seen}
    broken = [f"{host}: {problem}" for host, problem in seen.items() if isinstance(problem, str)]
    if broken:
        remedy = "Give these hosts the same access to the root: packages, credentials, mounts."
        return failure(_SHARED, f"not all hosts can open the root: {'; '.join(broken)}", remedy, **facts)
    blind = [host for host, sees in seen.items() if not sees]
    if blind:
        what = f"{', '.join(blind)} can't see there what {writer} writes"
        remedy = "Use a folder that all hosts share, or an object store; rank 0 may move to any host."
        return warning(_SHARED, what, remedy, **facts)
    return ok(_SHARED, f"what {writer} writes is seen by {', '.join(seen)}", **facts)
