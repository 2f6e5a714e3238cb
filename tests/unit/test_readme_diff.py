"""The diff that the README shows applies."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
LINES = ("import horovod.torch as hvd", "import hvdrecover.torch as hvd")


def test_the_diff_applies_and_changes_the_import_line(tmp_path: Path) -> None:
    """Horovod's source archive lacks its examples, so the file is made of what the diff says of it."""
    (diff,) = re.findall(r"```diff\n(--- .*?)```", README.read_text(), re.DOTALL)
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
