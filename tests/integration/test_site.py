"""The documentation is built as a site without a warning: links, anchors, docstrings and their arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_is_built(tmp_path: Path) -> None:
    """Takes 5 s of a core, and 10 more where .venv-docs has to be made first, as in CI."""
    command = [ROOT / "scripts" / "docs", "--site-dir", tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "hvdrecover run" in (tmp_path / "index.html").read_text()  # of the README
    assert (
        "#SBATCH" in (tmp_path / "files/examples/slurm/train.sbatch.html").read_text()
    )  # a file that is linked
    api = (tmp_path / "api" / "torch.html").read_text()
    assert 'id="hvdrecover.torch.TorchState.commit"' in api
    assert "::</p>" not in api
    assert '<a href="#hvdrecover.torch.Checkpoint"><code>Checkpoint</code></a>' in api
