"""The commands that look at a checkpoint root; see ``docs/commands.md``.

Each makes the document that ``--json`` prints, and its text for people from that.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from hvdrecover import config
from hvdrecover.checkpoint import leftovers
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import catalog, compare, prune, readable, verify
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.inspection.export import to_safetensors
from hvdrecover.checkpoint.inspection.verify import Verdict
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.near import place
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage import Storage, Temporary, open_storage
from hvdrecover.cli import options, printer
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError
from hvdrecover.reporting.text import counted

_COMMIT = re.compile(r"[0-9]+|g[0-9]+-c[0-9]+")
_RED, _YELLOW = ("quarantined", "broken", "newer format"), ("incomplete",)

Document = dict[str, Any]


def _add_root(parser: argparse.ArgumentParser) -> None:
    what = "the root: a path or an fsspec URL (default: HVDRECOVER_CHECKPOINT)"
    parser.add_argument("url", metavar="URL", nargs="?", help=what)
    options.add_json(parser)


def _add_commit(parser: argparse.ArgumentParser) -> None:
    what = "a name such as g0003-c00000120, or its number, 120; by default the newest complete one"
    parser.add_argument("commit", metavar="COMMIT", nargs="?", help=what)


def _open_root(arguments: argparse.Namespace) -> Storage:
    """Return the root of the command line, or else of the environment.

    With the latter, the first argument may be a commit already. Without any root, the command exits with 2.
    """
    default, given = config.read().checkpoint, arguments.url
    if given is not None and default is not None and _COMMIT.fullmatch(given) and not Path(given).exists():
        if "commits" in arguments:
            arguments.url, arguments.commits = None, [given, *arguments.commits]
        elif "commit" in arguments and arguments.commit is None:
            arguments.url, arguments.commit = None, given
    url: str = arguments.url or default or ""
    if not url:
        arguments.refuse("no checkpoint root was given: name its URL, or set HVDRECOVER_CHECKPOINT to it")
    return open_storage(url)


# -- from documents to text ----------------------------------------------------------------------------


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _age(time: float | None) -> str:
    return "" if time is None else printer.age(SYSTEM_CLOCK.now() - time)


def _versions(versions: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {version}" for name, version in (versions or {}).items())


def _frameworks(versions: Mapping[str, str] | None) -> str:
    ours = ("horovod", "hvdrecover")
    return _versions({name: version for name, version in (versions or {}).items() if name not in ours})


def _state(state: str) -> Text:
    return Text(state, "red" if state in _RED else "yellow" if state in _YELLOW else "")


def _digests(intact: bool | None) -> Text:
    if intact is None:
        return Text("unchecked")
    return Text("ok", "green") if intact else Text("broken", "red")


# Key of a document: the title of its column, and the function that makes its value a text.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str | Text]]] = {
    "commit": ("commit", str),
    "time": ("age>", _age),
    "world_size": ("ranks>", _text),
    "versions": ("framework", _frameworks),
    "state": ("state", _state),
    "intact": ("digests", _digests),
    "name": ("name", str),
    "dtype": ("dtype", str),
    "shape": ("shape", str),
    "bytes": ("size>", printer.size),
    "change": ("change", str),
    "largest": ("largest difference>", lambda largest: "" if largest is None else f"{largest:.3g}"),
}
_OF_A_COMMIT = ("commit", "time", "bytes", "world_size", "versions", "state")
_OF_A_TENSOR = ("name", "dtype", "shape", "bytes")
_OF_A_DIFFERENCE = ("name", "change", "largest")


def _table(items: Sequence[Document], *keys: str) -> list[RenderableType]:
    """Return a table with a row for each item and a column for each key; nothing without items."""
    columns = [_COLUMNS[key] for key in keys]
    rows = [[show(item[key]) for key, (_, show) in zip(keys, columns, strict=True)] for item in items]
    return [printer.table([title for title, _ in columns], rows)] if rows else []


def _with_notes(parts: Sequence[RenderableType], notes: Sequence[str]) -> list[RenderableType]:
    return [*parts, *([""] if parts and notes else []), *notes]


# -- ls and verify -------------------------------------------------------------------------------------


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Without --verify, only manifests are read."""
    parser.set_defaults(run=_ls)
    _add_root(parser)
    parser.add_argument("--verify", action="store_true", help="read every byte, and check it")


def _ls(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    entries, left = catalog.entries(storage), leftovers.find(storage)
    complete = [entry.id for entry in entries if entry.manifest is not None]
    verdicts = _verdicts(storage, complete) if arguments.verify else {}
    commits = [_commit(entry, verdicts.get(entry.id)) for entry in entries]
    begun = [entry for entry in entries if entry.id in left.commits]
    document = {
        "root": storage.url,
        "commits": commits,
        "leftovers": [entry.id.name for entry in begun],
        "aside": [*_aside(left.aside, left_over=True), *_aside(left.in_use, left_over=False)],
    }
    notes = [*_problems(commits)] if commits else [f"{storage.url} holds no commits yet"]
    if begun:
        nbytes = printer.size(sum(entry.nbytes for entry in begun))
        notes.append(f"incomplete, and no longer written: {counted(len(begun), 'commit')}, {nbytes}")
    if left.aside:
        notes.append(f"files of ended processes: {_files(left.aside)}")
    if begun or left.aside:
        notes.append("the next job deletes these before its first commit; prune deletes them now")
    if left.in_use:
        notes.append(f"being written: {_files(left.in_use)}")
    text = _with_notes(_table(commits, *_OF_A_COMMIT, "intact"), notes)
    printer.put(document, text, as_json=arguments.json)
    return 0


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Exits with 1 if one is broken."""
    parser.set_defaults(run=_verify)
    _add_root(parser)
    parser.add_argument("commits", metavar="COMMIT", nargs="*", help="by default all that are complete")


def _verify(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    verdicts = _verdicts(storage, verify.due(storage, arguments.commits))
    entries = filter(None, (catalog.entry(storage, commit) for commit in verdicts))
    commits = [_commit(entry, verdicts[entry.id]) for entry in entries]
    broken = sum(not each["intact"] for each in commits)
    summary = f"{storage.url}: {counted(len(commits), 'commit')} read, {broken or 'none'} broken"
    text = _with_notes(_table(commits, *_OF_A_COMMIT, "intact"), [*_problems(commits), summary])
    document = {"root": storage.url, "intact": not broken, "commits": commits}
    printer.put(document, text, as_json=arguments.json)
    return 1 if broken else 0


def _verdicts(storage: Storage, commits: Sequence[CommitId]) -> dict[CommitId, Verdict]:
    with printer.progress("verifying", verify.total_bytes(storage, commits)) as advance:
        return verify.verify_all(storage, commits, advance)


def _commit(entry: Entry, verdict: Verdict | None = None) -> Document:
    manifest = entry.manifest
    return {
        "commit": entry.id.name,
        "generation": entry.id.generation,
        "number": entry.id.commit,
        "time": manifest.time if manifest else None,
        "bytes": entry.nbytes,
        "world_size": manifest.world_size if manifest else None,
        "versions": manifest.versions if manifest else None,
        "state": entry.state,
        "reason": entry.reason,
        "intact": verdict.intact if verdict else None,
        "problems": verdict.problems if verdict else None,
    }


def _problems(commits: Iterable[Document]) -> Iterator[str]:
    for each in commits:
        if each["reason"]:
            yield f"{each['commit']} is {each['state']}: {each['reason']}"
        for file, problem in (each["problems"] or {}).items():
            yield f"{each['commit']} is broken: {file}: {problem}"


def _aside(files: Iterable[Temporary], *, left_over: bool) -> list[Document]:
    return [{"path": file.path, "bytes": file.nbytes, "left_over": left_over} for file in files]


def _files(files: Sequence[Temporary]) -> str:
    return f"{counted(len(files), 'file')}, {printer.size(sum(file.nbytes for file in files))}"


# -- show and diff -------------------------------------------------------------------------------------


def add_show(parser: argparse.ArgumentParser) -> None:
    """The command runs no code of the commit."""
    parser.set_defaults(run=_show)
    _add_root(parser)
    _add_commit(parser)


def _show(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    found = catalog.look_into(storage, catalog.find(storage, arguments.commit))
    manifest = found.manifest
    files = []
    for file in manifest.files:
        tensors = [_tensor(spec) for spec in found.layouts[file.name].specs]
        files.append({"name": file.name, "size": file.size, "digest": file.digest, "tensors": tensors})
    document = {
        **_commit(found.entry),
        "root": storage.url,
        "written": datetime.datetime.fromtimestamp(manifest.time).astimezone().isoformat(" ", "seconds"),
        "writer": manifest.writer,
        "dataset": manifest.dataset,
        "files": files,
        "attributes": found.attributes,
        "samplers": found.samplers,
        "random": manifest.state.get("random"),
    }
    printer.put(document, _content(document), as_json=arguments.json)
    return 0


def _content(document: Document) -> Iterator[RenderableType]:
    facts = {_COLUMNS[key][0].rstrip(">"): _COLUMNS[key][1](document[key]) for key in _OF_A_COMMIT}
    facts |= {
        "root": document["root"],
        "written": document["written"],
        "writer": _versions(document["writer"]),
    }
    if document["dataset"] is not None:
        facts["dataset"] = readable.text(document["dataset"])
    yield printer.pairs(facts)
    for file in document["files"]:
        yield printer.section(
            f"{file['name']}, {printer.size(file['size'])}", *_table(file["tensors"], *_OF_A_TENSOR)
        )
    for title, key in (("objects", "attributes"), ("sample cursors", "samplers")):
        # The tables of files show the tensors.
        shown = {name: value for name, value in document[key].items() if not readable.only_tensors(value)}
        if shown:
            lines = (f"{name} = {readable.text(value)}" for name, value in shown.items())
            yield printer.section(title, printer.plain("\n".join(lines)))
    if document["random"] is not None:
        yield printer.section("random streams", printer.plain(readable.text(document["random"])))


def add_diff(parser: argparse.ArgumentParser) -> None:
    """For tensors whose elements differ, the largest difference is max|b - a| over the elements that are
    finite in both.
    """
    parser.set_defaults(run=_diff)
    _add_root(parser)
    parser.add_argument("a", metavar="A", help="the commit to compare with")
    parser.add_argument("b", metavar="B", help="the commit that is compared with it")


def _diff(arguments: argparse.Namespace) -> int:
    storage = _open_root(arguments)
    a, b = catalog.find(storage, arguments.a), catalog.find(storage, arguments.b)
    with printer.progress("comparing", verify.total_bytes(storage, (a, b))) as advance:
        found, unchanged = compare.compare(storage, a, b, advance)
    differences = [vars(each) for each in found]
    document = {
        "root": storage.url,
        "a": a.name,
        "b": b.name,
        "differences": differences,
        "unchanged": unchanged,
    }
    text: list[RenderableType] = [
        Text(f"{a.name} → {b.name}", "bold"),
        *_table(differences, *_OF_A_DIFFERENCE),
    ]
    text += ["", f"{counted(unchanged, 'tensor')} unchanged"]
    printer.put(document, text, as_json=arguments.json)
    return 0


def _tensor(spec: TensorSpec) -> Document:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}


# -- prune ---------------------------------------------------------------------------------------------


def add_prune(parser: argparse.ArgumentParser) -> None:
    """A commit that any of the rules asks for is kept. What killed processes have left is deleted, too, when
    it is certain that nobody is writing it. Broken commits are left alone, and so is a commit that somebody
    reads. No commit is deleted unless one that is kept is intact. What is to be deleted is shown first, and
    asked for. With --near, what crashed jobs have left in this host's memory is deleted instead: of URL, or
    of all roots.
    """
    parser.set_defaults(run=_prune)
    _add_root(parser)
    near = "delete this user's near roots that no process keeps, on this host"
    period = "keep the first commit of each run of K commit numbers"
    best = "keep the best N (1) by an attribute of the state that is a number, such as val_loss:min"
    rule = parser.add_mutually_exclusive_group(required=True)
    rule.add_argument("--keep-last", **options.COUNT, help="keep the newest N commits")
    rule.add_argument("--near", action="store_true", help=near)
    parser.add_argument("--keep-period", type=options.count, metavar="K", help=period)
    parser.add_argument("--keep-within", **options.DURATION, help="keep commits younger than this")
    parser.add_argument("--keep-best", type=options.best, metavar="METRIC:min|max[:N]", help=best)
    sure = parser.add_mutually_exclusive_group()
    sure.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    sure.add_argument("-y", "--yes", action="store_true", help="delete without asking, for scripts")


def _prune(arguments: argparse.Namespace) -> int:
    if not (arguments.yes or arguments.dry_run or sys.stdin.isatty()):
        arguments.refuse("there is no terminal to ask at; add --yes to delete, or --dry-run to only look")
    if arguments.near:
        return _prune_near(arguments)
    storage = _open_root(arguments)
    keep = Keep(arguments.keep_last, arguments.keep_period, arguments.keep_within, arguments.keep_best)
    plan = prune.plan(storage, keep, SYSTEM_CLOCK)
    newest = [entry.id for entry in plan.keep[:1]]
    with printer.progress("verifying the newest commit", verify.total_bytes(storage, newest)) as advance:
        prune.check_one_is_intact(storage, plan, advance)
    gone = [*plan.delete, *plan.leftovers]
    if (gone or plan.aside) and not _agreed(arguments, _pruned(_pruning(storage, plan, gone, dry_run=True))):
        return 1
    if not arguments.dry_run:
        gone = list(prune.delete(storage, plan))
    document = _pruning(storage, plan, gone, dry_run=arguments.dry_run)
    printer.put(document, _pruned(document), as_json=arguments.json)
    return 0


def _pruning(storage: Storage, plan: prune.Plan, gone: Sequence[Entry], *, dry_run: bool) -> Document:
    return {
        "root": storage.url,
        "dry_run": dry_run,
        "deleted": [_commit(entry) for entry in gone],
        "leftovers": [entry.id.name for entry in gone if entry in plan.leftovers],
        "aside": _aside(plan.aside, left_over=True),
        "kept": [entry.id.name for entry in plan.keep],
        "untouched": [_commit(entry) for entry in plan.untouched],
        "bytes_freed": sum(entry.nbytes for entry in gone) + sum(file.nbytes for file in plan.aside),
    }


def _pruned(document: Document) -> Iterator[str]:
    verb = "would delete" if document["dry_run"] else "deleted"
    for each in document["deleted"]:
        incomplete = ", which was never completed" if each["commit"] in document["leftovers"] else ""
        yield f"{verb} {each['commit']}, {printer.size(each['bytes'])}{incomplete}"
    for each in document["untouched"]:
        reason = f": {each['reason']}" if each["reason"] else ""
        yield f"left {each['commit']}, which is {each['state']}{reason}"
    if aside := document["aside"]:
        size = printer.size(sum(file["bytes"] for file in aside))
        yield f"{verb} files of ended processes: {counted(len(aside), 'file')}, {size}"
    yield f"kept: {', '.join(document['kept']) or 'none'}"
    yield f"{verb} {counted(len(document['deleted']), 'commit')}, {printer.size(document['bytes_freed'])}"


def _prune_near(arguments: argparse.Namespace) -> int:
    setting = config.read().near
    near = "auto" if setting == "off" else setting
    only = None if arguments.url is None else place.folder(near, place.named(arguments.url))
    roots = [each for each in place.roots(near) if only is None or each.path == only]
    gone = [each for each in roots if not each.in_use]

    def document(*, dry_run: bool) -> Document:
        freed = sum(each.nbytes for each in gone)
        in_use = [each for each in roots if each not in gone]
        return {"dry_run": dry_run, "deleted": gone, "in_use": in_use, "bytes_freed": freed}

    if gone and not _agreed(arguments, _pruned_near(document(dry_run=True))):
        return 1
    if not arguments.dry_run:
        gone = [each for each in gone if place.remove(each.path)]
    made = document(dry_run=arguments.dry_run)
    printer.put(made, _pruned_near(made), as_json=arguments.json)
    return 0


def _pruned_near(document: Document) -> Iterator[str]:
    verb = "would delete" if document["dry_run"] else "deleted"
    for what, key in ((verb, "deleted"), ("left, since a process uses it:", "in_use")):
        for root in document[key]:
            of = f"{printer.size(root.nbytes)} of {root.url or 'an unknown root'}"
            yield f"{what} {root.path}: {of}, last used {_age(root.used)} ago"
    yield f"{verb} {counted(len(document['deleted']), 'near root')}, {printer.size(document['bytes_freed'])}"


def _agreed(arguments: argparse.Namespace, plan: Iterable[str]) -> bool:
    """Return whether to go ahead: nothing is deleted, ``--yes`` is given, or the user agrees."""
    if arguments.dry_run or arguments.yes:
        return True
    printer.put_text(plan, sys.stderr)
    sys.stderr.write("delete these? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stderr.write("hvdrecover: nothing was deleted\n")
    return False


# -- export --------------------------------------------------------------------------------------------


def add_export(parser: argparse.ArgumentParser) -> None:
    """A .pt file holds a dict, attribute to state_dict, for torch.load(weights_only=True); writing it takes
    torch and Horovod. A .keras file holds a model, for keras.models.load_model; writing it takes TensorFlow
    and Horovod. A .safetensors file holds tensors alone, under their own names, or with the attribute's
    before them if several attributes are exported.
    """
    parser.set_defaults(run=_export)
    _add_root(parser)
    _add_commit(parser)
    formats = "FILE.pt, FILE.keras or FILE.safetensors"
    file: dict[str, Any] = {"required": True, "type": options.exported_file, "metavar": "FILE"}
    parser.add_argument("-o", "--output", **file, help=formats)
    attribute = "export this attribute of the state, such as model; can be given several times"
    parser.add_argument("--only", action="append", default=[], metavar="ATTRIBUTE", help=attribute)
    model_config = "for a .keras file: what model.to_json() gives, or another .keras file of the model"
    parser.add_argument("--model-config", type=Path, metavar="FILE", help=model_config)
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def _export(arguments: argparse.Namespace) -> int:
    file = arguments.output
    if file.suffix == ".keras" and arguments.model_config is None:
        arguments.refuse("a commit holds no model config, so a .keras file takes --model-config FILE, too")
    if file.suffix != ".keras" and arguments.model_config is not None:
        arguments.refuse("--model-config is for a .keras file only")
    storage = _open_root(arguments)
    commit = catalog.find(storage, arguments.commit)
    names = _exporter(arguments)(storage, commit, arguments.only, file, force=arguments.force)
    size = file.stat().st_size
    document = {"root": storage.url, "commit": commit.name, "attributes": names, "file": file, "bytes": size}
    text = f"{', '.join(names)} of {commit.name}: {file}, {printer.size(size)}"
    printer.put(document, [text], as_json=arguments.json)
    return 0


def _exporter(arguments: argparse.Namespace) -> Callable[..., list[str]]:
    """Return the function that writes a file of the wanted format; it may import a framework."""
    suffix = arguments.output.suffix
    try:
        if suffix == ".pt":
            from hvdrecover.torch.export import to_torch

            return to_torch
        if suffix == ".keras":
            config.quiet_tensorflow()
            from hvdrecover.tensorflow.export import to_keras

            return functools.partial(to_keras, model_config=arguments.model_config)
    except ImportError as error:
        framework = "PyTorch" if suffix == ".pt" else "TensorFlow"
        raise ConfigError(
            "--output",
            f"writing a {suffix} file takes {framework} and Horovod, and one of them can't be imported here "
            f"({error}); install it, or export to a .safetensors file",
        ) from error
    return to_safetensors
