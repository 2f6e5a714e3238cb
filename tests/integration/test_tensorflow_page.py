"""The code that docs/tensorflow.md shows is run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import SKLEARN
from tests.support.jobs import run_job, static

PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text()
STOP = """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 24 and "--stop" in sys.argv:
            state.flush()
            raise SystemExit(3)
"""

pytestmark = pytest.mark.acceptance


def test_its_script_continues_inside_the_epoch_with_another_number_of_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(import horovod\.tensorflow.*?)```", PAGE, re.DOTALL)
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
