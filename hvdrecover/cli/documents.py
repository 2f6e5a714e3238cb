"""The findings of the commands, as JSON; described in ``docs/commands.md``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.inspection.compare import Change, Difference
from hvdrecover.checkpoint.inspection.contents import Contents
from hvdrecover.checkpoint.inspection.prune import Plan
from hvdrecover.checkpoint.inspection.verify import Verdict
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.leftovers import Leftovers
from hvdrecover.checkpoint.near.place import NearRoot

Document = dict[str, Any]


def dumps(document: Document) -> str:
    """A document as text."""
    return json.dumps(document, indent=1) + "\n"


def listing(
    url: str, entries: Sequence[Entry], left: Leftovers, verdicts: Mapping[CommitId, Verdict]
) -> Document:
    """Return what ``ls`` has found."""
    return {
        "root": url,
        "commits": [_entry(entry, verdicts.get(entry.id)) for entry in entries],
        "leftovers": [entry.id.name for entry in entries if entry.id in left.commits],
        "aside": [
            {"path": file.path, "bytes": file.nbytes, "left_over": file in left.aside}
            for file in (*left.aside, *left.in_use)
        ],
    }


def contents(url: str, found: Contents) -> Document:
    """Return what ``show`` has found."""
    files = [
        {**dataclasses.asdict(file), "tensors": [_tensor(spec) for spec in found.layouts[file.name].specs]}
        for file in found.manifest.files
    ]
    return {
        "root": url,
        **_entry(found.entry, None),
        "writer": found.manifest.writer,
        "dataset": found.manifest.dataset,
        "files": files,
        "attributes": found.attributes,
        "samplers": found.samplers,
        "random": found.manifest.state.get("random"),
    }


def verdicts(url: str, found: Mapping[CommitId, Verdict]) -> Document:
    """Return what ``verify`` has found."""
    commits = [
        {"commit": id.name, "intact": verdict.intact, "problems": verdict.problems, "bytes": verdict.nbytes}
        for id, verdict in found.items()
    ]
    return {"root": url, "intact": all(verdict.intact for verdict in found.values()), "commits": commits}


def difference(url: str, a: CommitId, b: CommitId, found: Difference) -> Document:
    """Return what ``diff`` has found."""
    return {
        "root": url,
        "a": a.name,
        "b": b.name,
        "added": [_tensor(spec, name) for name, spec in found.added.items()],
        "removed": [_tensor(spec, name) for name, spec in found.removed.items()],
        "reshaped": [
            {"name": name, "a": str(before), "b": str(after)}
            for name, (before, after) in found.reshaped.items()
        ],
        "changed": [_change(change) for change in found.changes],
        "unchanged": found.unchanged,
        "objects": [{"path": path, "a": a, "b": b} for path, (a, b) in found.objects.items()],
    }


def pruned(url: str, plan: Plan, deleted: Sequence[Entry] | None) -> Document:
    """Return what ``prune`` has done, or would do if ``deleted`` is None."""
    gone = [*plan.delete, *plan.leftovers] if deleted is None else deleted
    return {
        "root": url,
        "dry_run": deleted is None,
        "deleted": [{"commit": entry.id.name, "bytes": entry.nbytes} for entry in gone],
        "leftovers": [entry.id.name for entry in gone if entry in plan.leftovers],
        "aside": [{"path": file.path, "bytes": file.nbytes} for file in plan.aside],
        "kept": [entry.id.name for entry in plan.keep],
        "untouched": [{"commit": entry.id.name, "state": entry.state} for entry in plan.untouched],
        "bytes_freed": sum(entry.nbytes for entry in gone) + sum(file.nbytes for file in plan.aside),
    }


def pruned_near(gone: Sequence[tuple[NearRoot, bool]], *, dry_run: bool) -> Document:
    """Return what ``prune --near`` has done, or would do."""
    return {
        "dry_run": dry_run,
        "deleted": [_near(root) for root, done in gone if done],
        "in_use": [_near(root) for root, done in gone if not done],
        "bytes_freed": sum(root.nbytes for root, done in gone if done),
    }


def _near(root: NearRoot) -> Document:
    return {"path": str(root.path), "root": root.url, "bytes": root.nbytes, "used": root.used}


def exported(url: str, id: CommitId, attributes: Sequence[str], file: Path) -> Document:
    """Return what ``export`` has done."""
    return {
        "root": url,
        "commit": id.name,
        "attributes": list(attributes),
        "file": str(file),
        "bytes": file.stat().st_size,
    }


def _entry(entry: Entry, verdict: Verdict | None) -> Document:
    manifest = entry.manifest
    return {
        "commit": entry.id.name,
        "generation": entry.id.generation,
        "number": entry.id.commit,
        "state": entry.state,
        "reason": entry.reason,
        "bytes": entry.nbytes,
        "time": manifest.time if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "versions": manifest.versions if manifest else None,
        "intact": verdict.intact if verdict else None,
        "problems": verdict.problems if verdict else None,
    }


def _tensor(spec: TensorSpec, name: str | None = None) -> Document:
    facts = {"dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
    return {"name": spec.name if name is None else name, **facts}


def _change(change: Change) -> Document:
    return {
        **_tensor(change.spec, change.tensor),
        "elements_changed": change.changed,
        "non_finite": change.non_finite,
        "largest_change": _number(change.largest),
        "largest_value": _number(change.scale),
        "relative_change": _number(change.relative),
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
