from __future__ import annotations

import subprocess
import sys

from tests.unit.launch.children import environment

# Horovod's own function that runs a worker, after what our driver has set up.
CODE = """
from types import SimpleNamespace
from hvdrecover.launch import run_horovodrun
run_horovodrun._leave_to_guardians()
from horovod.runner.gloo_run import _exec_command_fn
settings = SimpleNamespace(elastic=True, verbose=0, output_filename=None, prefix_output_with_timestamp=False)
slot = SimpleNamespace(rank=1, hostname="localhost")
print([_exec_command_fn(settings)(f"exit {code}", slot, None)[0] for code in (3, 129, 255)])
"""


def test_horovod_says_of_a_worker_only_what_its_guardian_cannot() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "Process 1 exit with status code 255.\n[3, 129, 255]\n", done.stderr
