"""The README's diff applies; its commands and those of ``docs`` can be parsed, and their examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from hvdrecover import cli
from hvdrecover.cli import discovering
from hvdrecover.discovery import Host, sources

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LINES = ("import horovod.torch as hvd", "import hvdrecover.torch as hvd")


def test_the_diff_applies_and_changes_the_import_line(tmp_path: Path) -> None:
    """Horovod's source archive lacks its examples, so the file is made of what the diff says of it."""
    (diff,) = re.findall(r"```diff\n(--- .*?)```", README, re.DOTALL)
    (path,) = re.findall(r"^--- a/(.*)$", diff, re.MULTILINE)
    (first,) = re.findall(r"^@@ -(\d+),", diff, re.MULTILINE)
    known = [line[1:] for line in diff.splitlines()[3:] if not line.startswith("+")]
    before = [*[f"# line {number}" for number in range(1, int(first))], *known, "# more"]
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("\n".join(before) + "\n")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    after = (tmp_path / path).read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [LINES]


@pytest.fixture(autouse=True)
def hvdrecover_ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/clusters/ray.md has commands with the source of that package."""
    monkeypatch.setitem(sources.OURS, "ray", "hvdrecover_ray.nodes:ray_nodes")


PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in ROOT.glob("docs/**/*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=str)


def typed(text: str) -> list[str]:
    """Return the command lines of a page's blocks, without prompts and comments; a continued line is one."""
    blocks = re.findall(r"^```(?:console|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if re.match(r"\$ |exec ", line)]


def arguments_of(line: str) -> list[str] | None:
    """Return what a command line gives to ``hvdrecover``; None if it starts something else."""
    words = shlex.split(line, comments=True)
    while words and (words[0] in ("exec", "sudo") or re.match(r"\w+=", words[0])):
        del words[0]
    return words[1:] if words and Path(words[0]).name == "hvdrecover" else None


def check(line: str) -> None:
    """Have the parsers read a command line, and the sources of hosts within it; wrong ones exit with 2."""
    if (argv := arguments_of(line)) is not None:
        given = cli.parsed(argv)
        if given.named == "discover":
            discovering.parse([given.source, *given.words])
        elif getattr(given, "discover", None) is not None:
            discovering.parse(discovering.request(given.discover, []))
        return
    for words in re.findall(r'"discover-hosts ([^"]*)"', line):
        discovering.parse(discovering.request(words, []))


@each_page
def test_each_command_that_is_named_exists(page: Path) -> None:
    """`worker` is left out of the help, as our own processes call it."""
    known = {*re.findall(r"^## (\S+)$", (ROOT / "docs" / "help.md").read_text(), re.MULTILINE), "worker"}
    named = re.findall(r"(?:`|^\$ |&& )hvdrecover ([a-z][a-z-]*)", (ROOT / page).read_text(), re.MULTILINE)
    assert {*named} <= known


@each_page
def test_each_command_that_is_shown_is_understood(page: Path) -> None:
    for line in typed((ROOT / page).read_text()):
        check(line)


def test_each_command_is_shown_somewhere() -> None:
    shown = [arguments_of(line) for page in PAGES for line in typed((ROOT / page).read_text())]
    known = {name for names in cli.GROUPS.values() for name in names}
    assert known <= {argv[0] for argv in shown if argv}


def test_the_example_of_a_source_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's command line names the source, too."""
    page = (ROOT / "docs" / "discovery.md").read_text()
    (module,) = re.findall(r"^```python\n(# my_cluster\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_cluster.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.OURS, "rack", "my_cluster:rack")
    (words,) = re.findall(r'--discover "(rack [^"]*)"', page)
    source, _ = discovering.parse(discovering.request(words, []))
    assert source({}, 5.0) == [Host("rack7-a", 4), Host("rack7-b", 4)]
