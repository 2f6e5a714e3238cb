"""The commands that look at a checkpoint root: what they say, and how they exit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover import cli
from hvdrecover.checkpoint import near_tier
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage.local import LocalStorage
from tests.support.commands import answer, call, on_a_terminal, plain_lines
from tests.unit.checkpoint.roots import content, make_snapshot, make_store, signed

DOCS = Path(__file__).parents[2] / "docs" / "commands.md"
HELP = DOCS.with_name("help.md")
SHOWN = re.findall(
    r"^\$ hvdrecover ((?!report|status|stop).*)$", DOCS.read_text(), re.MULTILINE
)  # of roots, not of runs
NEEDS_A_FRAMEWORK = re.compile(r"\.(pt|keras)\b")  # those are run by the framework's tests


@pytest.fixture
def root(tmp_path):
    """A checkpoint root with the commits 1, 2 and 3, written in 1970; the run finished at the last."""
    storage = LocalStorage(tmp_path / "root")
    store = make_store(storage, keep=9)
    store.claim_next()
    for number in (1, 2, 3):
        store.write(snapshot(number), rank=0)
    return tmp_path / "root"


def snapshot(number: int) -> Snapshot:
    made = make_snapshot(1, number, finished=number == 3)
    tensors = {name: {"$tensor": name} for name in ("weight", "empty")}
    plain = {"val_loss": 1 / number, "name": "\x1b[31mred"}
    made.state["attributes"] = {"model": tensors, "optimizer": tensors, **plain}
    made.state["samplers"] = {"sampler": {"epoch": number}}
    return made


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ls"], "g0001-c00000002"),
        (["show"], "g0001-c00000003"),
        (["diff", "1", "2"], "g0001-c00000001 → g0001-c00000002"),
        (["export", "1", "--only", "model", "-o", "x.safetensors"], "of g0001-c00000001"),
        (["prune", "--keep-last", "1", "--dry-run"], "would delete 2 commits"),
    ],
)
def test_the_environment_names_the_root_if_no_argument_does(words, named, root, capsys, monkeypatch):
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", str(root))
    assert cli.main(words) == 0
    assert named in capsys.readouterr().out


EVIL = "\x1b]0;pwn\x07\x1b[31m[/]x\u202e\n\x9b2J"


def write_evil(root: Path) -> None:
    """Give the newest commit what somebody may have written into its manifest."""
    file = root / "g0001-c00000003" / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    del manifest["digest"]
    manifest["versions"] = {EVIL: EVIL, "framework": "[/z]"}
    manifest["writer"] = {EVIL: EVIL, "host": EVIL}
    attributes = manifest["state"]["attributes"]
    attributes |= {EVIL: EVIL, "choice": {"$enum": ["os:path", EVIL]}, "key": {EVIL: [EVIL]}}
    manifest["state"]["samplers"][EVIL] = {EVIL: EVIL}
    file.write_bytes(signed(manifest))


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "{}"),
        ("show", "{}"),
        ("diff", "{}", "2", "3"),
        ("export", "{}", "--only", EVIL, "-o", "x.safetensors"),
        ("show", "{}", "2" + EVIL),
    ],
)
def test_a_terminal_obeys_nothing_that_stands_in_a_root(words, root, capsys, monkeypatch):
    write_evil(root)
    monkeypatch.chdir(root.parent)
    cli.main([each.format(root) for each in words])
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []


@pytest.fixture
def run(capsys):
    """Runs a command, and gives its exit code, its output and its errors."""

    def run(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def document(run):
    """Runs a command with ``--json``, and gives its exit code and the document."""

    def document(*arguments):
        code, output, _ = run(*arguments, "--json")
        return code, json.loads(output)

    return document


# -- verify --------------------------------------------------------------------------------------------


def test_verify_exits_with_1_and_names_what_is_broken(run, document, root):
    file = root / "g0001-c00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    before = content(LocalStorage(root))
    code, output, _ = run("verify", root)
    assert code == 1
    assert re.search(r"\ng0001-c00000002 .* broken\n", output)
    assert re.search(r"g0001-c00000002 is broken: model\.safetensors: .*digest", output)
    code, found = document("verify", root)
    assert (code, found["intact"]) == (1, False)
    assert [list(commit["problems"]) for commit in found["commits"]] == [[], ["model.safetensors"], []]
    assert run("verify", root, "3", "1")[0] == 0
    assert content(LocalStorage(root)) == before


# -- prune ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_prune_deletes_near_roots_that_no_process_keeps(run, document, tmp_path, monkeypatch, named):
    monkeypatch.setenv("HVDRECOVER_NEAR", str(tmp_path / "near"))
    near = str(tmp_path / "near")
    one, other = (near_tier.folder(near, near_tier.named(f"/roots/{name}")) for name in "ab")
    for path, name in ((one, "a"), (other, "b")):
        near_tier.make(path, f"file:///roots/{name}")
        (path / "g0001-c00000001").mkdir()
        (path / "g0001-c00000001" / "model.safetensors").write_bytes(b"x" * 4096)
    keeper = near_tier.Keeper.take(other)
    which = ["/roots/a"] if named else []
    _, planned = document("prune", *which, "--near", "--dry-run")
    assert [(each["path"], each["url"]) for each in planned["deleted"]] == [(str(one), "file:///roots/a")]
    code, output, _ = run("prune", *which, "--near", "--yes")
    assert code == 0 and "deleted 1 near root, " in output
    assert ("left, since a process uses it" in output) != named
    assert not one.exists() and other.exists()
    keeper.release()


@pytest.mark.parametrize(("typed", "code", "left"), [("y", 0, 1), ("", 1, 3)])
def test_prune_says_what_it_will_delete_and_asks(root, typed, code, left):
    done, output = on_a_terminal(80, "prune", root, "--keep-last", "1", answer=f"{typed}\n")
    lines = plain_lines(output)
    asked = next(number for number, line in enumerate(lines) if "delete these? [y/N]" in line)
    assert [line for line in lines[:asked] if line.startswith("would delete g0001-c00000002, ")]
    assert (done, len(list(root.glob("g*")))) == (code, left)
    assert any("nothing was deleted" in line for line in lines) == (code == 1)


@pytest.mark.parametrize("rule", [["--keep-last", "1"], ["--near"]])
def test_without_a_terminal_prune_asks_for_a_yes(run, root, rule):
    before = content(LocalStorage(root))
    code, output, errors = run("prune", root, *rule)
    assert (code, output) == (2, "")
    assert "there is no terminal to ask at; add --yes to delete, or --dry-run to only look" in errors
    assert content(LocalStorage(root)) == before


# -- what killed processes have left -------------------------------------------------------------------


CLAIM = """
import sys
from pathlib import Path
from tests.unit.checkpoint.roots import make_store
from hvdrecover.checkpoint.storage.local import LocalStorage
make_store(LocalStorage(Path(sys.argv[1])), job="next").claim_next()
"""


def test_what_an_ended_process_has_left_is_shown_and_pruned(run, document, root):
    (root / "g0001-c00000002" / "QUARANTINE.json").write_text('{"reason": "a flipped bit"}')
    subprocess.run([sys.executable, "-c", CLAIM, root], check=True)
    (root / ".hvdrecover-g0002-c00000004-12ab").write_bytes(b"spare")
    (root / "g0002-c00000005").mkdir()
    (root / "g0002-c00000005" / "model.safetensors").write_bytes(b"x" * 9000)
    assert "\nleft by ended processes: 9.01 kB; the next job or prune deletes them\n" in run("ls", root)[1]
    _, found = document("ls", root)
    assert (found["leftovers"], found["aside"][0]["left_over"]) == (["g0002-c00000005"], True)
    output = run("prune", root, "--keep-last", "9", "--dry-run")[1]
    assert "would delete g0002-c00000005" in output
    assert "left g0001-c00000002, which is quarantined: a flipped bit" in output
    _, found = document("prune", root, "--keep-last", "9", "--yes")
    assert (found["leftovers"], found["bytes_freed"]) == (["g0002-c00000005"], 9005)
    left = [path.name for path in root.iterdir() if path.name != "claims"]
    assert sorted(left) == [f"g0001-c0000000{number}" for number in (1, 2, 3)]


# -- errors --------------------------------------------------------------------------------------------

COMMANDS = (
    ["ls"],
    ["show"],
    ["verify"],
    ["diff", "1", "2"],
    ["prune", "--keep-last", "1", "--yes"],
    ["export", "-o", "x.safetensors"],
)


@pytest.mark.parametrize(
    ("url", "fact"),
    [
        ("carrierpigeon://user:hunter2@loft/run", "checkpoint: 'carrierpigeon://loft/run' "),
        ("missing", "/missing: .*empty"),
        ("foreign", "/foreign: .*'photo.jpg'"),
        ("root/g0001-c00000001", "/root/g0001-c00000001: .*above"),
        ("foreign/photo.jpg", "/foreign/photo.jpg: .*list"),
    ],
)
def test_a_url_that_is_no_root_is_an_error_of_one_line(run, root, monkeypatch, url, fact):
    monkeypatch.chdir(root.parent)
    Path("foreign").mkdir()
    Path("foreign/photo.jpg").write_bytes(b"")
    for command in COMMANDS:
        code, output, errors = run(command[0], url, *command[1:])
        assert (code, output, errors.count("\n")) == (1, "", 1)
        assert re.match(f"hvdrecover: .*{fact}", errors)
        assert "hunter2" not in errors
    assert not Path("missing").exists() and not Path("x.safetensors").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ls"],
        ["nonsense"],
        ["ls", "root", "s3://key:hunter2@bucket"],
        ["prune", "root", "--keep-last", "1", "--near", "--yes"],
        ["prune", "root", "--keep-last", "0"],
        ["prune", "root", "--keep-last", "1", "--keep-best", "loss"],
        ["export", "root", "-o", "model.bin"],
        ["export", "root", "-o", "model.keras"],
    ],
)
def test_wrong_arguments_exit_with_2(run, arguments):
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("usage: hvdrecover")
    assert "hunter2" not in errors


# -- processes -----------------------------------------------------------------------------------------


def test_looking_imports_no_framework(root, tmp_path):
    file = str(tmp_path / "x.safetensors")
    commands = [["ls"], ["show"], ["verify"], ["diff", "1", "3"], ["export", "-o", file, "--only", "model"]]
    program = f"""
import sys
from hvdrecover.cli import main
for command, *others in {commands}:
    assert main([command, {str(root)!r}, *others]) == 0
print("", *sys.modules)
"""
    imported = {name.split(".")[0] for name in answer(program).splitlines()[-1].split()}
    assert {"hvdrecover", "rich"} <= imported
    assert not imported & {"torch", "tensorflow", "keras", "horovod"}


def test_a_shell_gets_completions(tmp_path):
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "hvdrecover prune --keep-p", "COMP_POINT": "25"}
    call(environ={**asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "completions")})
    assert (tmp_path / "completions").read_text().strip() == "--keep-period"


def test_a_terminal_of_80_columns_is_enough_and_shows_progress(root):
    code, output = on_a_terminal(80, "ls", root, "--verify")
    assert code == 0
    assert "verifying" in output and "\x1b[" in output
    table = [line for line in plain_lines(output) if "torch 2.13.0" in line]
    assert [line.split()[-1] for line in table] == ["ok", "ok", "ok"]
    assert all(len(line) <= 80 for line in table)


# -- the documentation ---------------------------------------------------------------------------------


def test_the_page_of_help_texts_is_what_commands_print():
    script = DOCS.parents[1] / "scripts" / "help_texts.py"
    written = subprocess.check_output([sys.executable, script], text=True, timeout=120)
    if sys.version_info < (3, 13):  # argparse words some of it differently from then on
        assert HELP.read_text() == written, "python scripts/help_texts.py > docs/help.md"


def test_what_the_documentation_shows_runs(run, root, monkeypatch):
    monkeypatch.chdir(root.parent)
    shutil.copytree(root, "checkpoints/run-1")
    for command in SHOWN:
        if NEEDS_A_FRAMEWORK.search(command):
            continue
        code, output, errors = run(*command.split())
        assert (code, errors) == (0, ""), command
        assert output
    assert Path("model.safetensors").exists()


def test_the_documentation_names_every_key(document, root, tmp_path):
    text = DOCS.read_text()
    for command in (*COMMANDS[:4], ["prune", "--keep-last", "2", "--yes"]):
        _, found = document(command[0], root, *command[1:])
        for key in [*found, *(key for item in found.get("commits", []) for key in item)]:
            assert f"`{key}`" in text, f"{command[0]}: {key}"
