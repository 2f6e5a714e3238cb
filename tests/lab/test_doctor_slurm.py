"""``hvdrecover run --preflight`` in a job of a real Slurm, with a node that computes wrongly."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from hvdrecover.drill.lab.lab import Lab
from hvdrecover.examples.digits_run import PATIENCE, DigitsRun
from tests.integration.conftest import LONG
from tests.lab.conftest import SLOW_HOSTS
from tests.lab.slurm import Slurm
from tests.lab.test_doctor import WRONG_PRODUCTS
from tests.lab.test_slurm import cluster
from tests.waiting import wait_until

__all__ = ["cluster"]


@LONG  # half a minute
def test_a_node_that_computes_wrongly_is_left_out(lab: Lab, cluster: Slurm, tmp_path: Path) -> None:
    second = lab.hosts[1]
    (tmp_path / "sitecustomize.py").write_text(WRONG_PRODUCTS.format(address=second.address))
    run = DigitsRun(tmp_path / "run", 1)
    command = [sys.executable, "-m", "hvdrecover", "run", "--preflight", "-np", "3", "--min-np", "2"]
    command += ["--discover", "slurm", "--no-standby", "--", sys.executable]
    command += ["-m", "hvdrecover.examples.torch_digits", "--epochs", "1", "--checkpoint", str(run.root)]
    command += ["--ledger", str(run.folder / "ledger")]
    words = ["--parsable", "--nodes=3", "--ntasks-per-node=1", f"--output={run.folder}/log.txt"]
    environ = {
        **SLOW_HOSTS,
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
        "HVDRECOVER_EVENTS": str(run.folder / "events"),
        "HVDRECOVER_NEAR": "off",  # the hosts of a lab have one memory
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # jobs of all clusters have the same numbers
        "PATH": os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    job = cluster.run("sbatch", *words, "--wrap", shlex.join(command), environ=environ).strip()
    wait_until(lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"), PATIENCE)
    assert cluster.job(job)["ExitCode"] == "0:0", run.log
    assert {batch.size for batch in run.batches()} == {2}
    assert f"{second.name} left out: compute: computed wrongly: {second.name}: CPU " in run.log
    assert "2 of 3 hosts are used, for 2 processes" in run.log
