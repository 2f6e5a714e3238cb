"""The README's diff applies, and its numbers, links and commands are right."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hvdrecover.install import EDITS, HOROVOD_VERSION

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


def test_it_counts_the_edits_of_horovods_source() -> None:
    assert f"Horovod {HOROVOD_VERSION} with {len(EDITS)} edits of its source" in README


def test_it_can_be_read_in_one_go() -> None:
    assert len(README.splitlines()) < 200


@pytest.mark.parametrize("path", sorted({*re.findall(r"\]\(([\w/.-]+)[)#]", README)}))
def test_its_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.stem
)
def test_each_command_that_is_named_exists(page: Path) -> None:
    """`worker` is left out of the help, as our own processes call it."""
    known = {*re.findall(r"^## (\S+)$", (ROOT / "docs" / "help.md").read_text(), re.MULTILINE), "worker"}
    named = re.findall(r"(?:`|^\$ |&& )hvdrecover ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    assert {*named} <= known
