"""The scripts and the commands of docs/torch.md and docs/tensorflow.md run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import SKLEARN
from tests.support.jobs import ROOT_MAY_USE_MPI, run_job, static

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "torch.md").read_text()
SUPERVISED, *COMMANDS = re.findall(r"^\$ (.*train\.py)$", PAGE, re.MULTILINE)

pytestmark = pytest.mark.acceptance


def test_it_shows_each_way_to_start() -> None:
    starts = [command.split()[0] for command in COMMANDS]
    assert starts == ["python", "horovodrun", "horovodrun", "mpirun", "horovodrun"]
    assert SUPERVISED.startswith("hvdrecover run ")


def test_its_script_resumes_through_all_its_commands(tmp_path: Path) -> None:
    """Each command is killed by a script error at a later commit, and the next one resumes from there."""
    (script,) = re.findall(r"```python\n(import horovod\.torch.*?)```", PAGE, re.DOTALL)
    marker = "            state.commit()"
    assert marker in script
    stop = """
            if state.last_commit.commit >= int(os.environ["STOP_AT"]):
                state.flush()
                hvd.barrier()  # a launcher ends the other workers as soon as one has failed
                raise SystemExit(3)"""
    (tmp_path / "train.py").write_text("import os\n" + script.replace(marker, marker + stop, 1))
    (tmp_path / "hosts").write_text("localhost:1\n127.0.0.1:1\n")
    path = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])

    def run(command: str, stop_at: int = 10**9) -> str:
        # sh finds the programs on the path that is set here, as the reader's shell would.
        words = ["sh", "-c", f"cd {shlex.quote(str(tmp_path))} && {command}"]
        environ = {"STOP_AT": str(stop_at), "PATH": path, **ROOT_MAY_USE_MPI, **SKLEARN}
        return run_job(words, tmp_path / "log", environ)

    for number, command in enumerate(COMMANDS, start=1):
        log = run(f"! {command}", stop_at=10 * number)
        resumed = re.findall(r"resumed from commit (\d+)", log)
        assert [int(commit) for commit in resumed] == [10 * earlier for earlier in range(1, number)]
    assert "finished at commit" in run(SUPERVISED)
    (look,) = re.findall(r"^\$ (hvdrecover ls .*)$", PAGE, re.MULTILINE)
    assert "finished" in run(look).splitlines()[-3]


OF_TENSORFLOW = (DOCS / "tensorflow.md").read_text()
STOP = """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 24 and "--stop" in sys.argv:
            state.flush()
            raise SystemExit(3)
"""


def test_its_script_continues_inside_the_epoch_with_another_number_of_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(import horovod\.tensorflow.*?)```", OF_TENSORFLOW, re.DOTALL)
    callbacks = "callbacks=recover.fit_callbacks(state, commit_every_batches=10),"
    assert callbacks in script
    script = script.replace(callbacks, f"callbacks=[*{callbacks[10:-1]}, Stop()],")
    (tmp_path / "train.py").write_text(
        "import sys\n" + script.replace("\n\n@recover.run", STOP + "\n\n@recover.run")
    )
    script = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), sys.executable, "train.py"]
    run_job([*script, "--stop"], tmp_path / "log", SKLEARN, code=3)
    log = run_job([*static(2), *script], tmp_path / "log", SKLEARN)
    assert "resumed from commit 2 " in log
    epochs = re.findall(r"Epoch (\d)/5", log)
    assert epochs == ["1", "1", "2", "3", "4", "5"]
    assert "finished at commit" in log
    assert "ran out of data" not in log
    assert "Warning" not in log
