"""The MPI source with this environment's real mpirun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.mpi import Mpi

PROGRAMS = Path(sys.executable).parent
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
HERE = socket.gethostname()
PATIENCE = 120.0  # seconds

pytestmark = pytest.mark.skipif(not (PROGRAMS / "mpirun").exists(), reason="this environment has no mpirun")


def environment():
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **AS_ROOT, "PATH": path}


def test_a_host_has_a_slot_for_each_rank():
    assert Mpi("mpirun -np 3 --oversubscribe").hosts(environment(), PATIENCE) == [Host(HERE, 3)]


def test_ranks_whose_lines_mpirun_marks_are_understood():
    found = Mpi("mpirun -np 2 --oversubscribe --tag-output --display-map").hosts(environment(), PATIENCE)
    assert found == [Host(HERE, 2)]


def test_inside_of_another_mpirun():
    program = (
        "import json, os\n"
        "from hvdrecover.discovery.sources.mpi import Mpi\n"
        f"found = Mpi('mpirun -np 2 --oversubscribe').hosts(dict(os.environ), {PATIENCE})\n"
        "print(json.dumps([[host.name, host.slots] for host in found]))\n"
    )
    command = [str(PROGRAMS / "mpirun"), "-np", "1", sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[HERE, 2]]
