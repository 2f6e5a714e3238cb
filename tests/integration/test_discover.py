"""``hvdrecover discover``: each source of hosts, as Horovod's driver calls it."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig, pod
from tests.support.commands import call
from tests.support.jobs import ROOT_MAY_USE_MPI

PROGRAMS = Path(sys.executable).parent
NO_CHECKS = "--no-ssh-check"  # of hosts that exist nowhere
CLUSTER = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"], "ps": ["d:2222"]}
TF_CONFIG = json.dumps({"cluster": CLUSTER, "task": {"type": "chief", "index": 0}})

pytestmark = pytest.mark.acceptance


def discover(folder: Path, *words: object, **environ: str) -> str:
    """Call the command, and return its output: a line ``host:slots`` for each host."""
    done = call("discover", *words, environ={"XDG_CACHE_HOME": str(folder / "cache"), **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_and_a_command(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a:4\nb slots=2\n")
    assert discover(tmp_path, "file", file, NO_CHECKS) == "a:4\nb:2\n"
    assert discover(tmp_path, "command", NO_CHECKS, "printf", "c:1\\nd:2\\n") == "c:1\nd:2\n"


@pytest.mark.parametrize(
    ("source", "environ", "hosts"),
    [
        ("tf-config", {"TF_CONFIG": TF_CONFIG}, "a:1\nb:1\nc:1\n"),
        ("lsf", {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "a 4 b 2"}, "a:4\nb:2\n"),
    ],
)
def test_the_hosts_that_variables_name(
    source: str, environ: dict[str, str], hosts: str, tmp_path: Path
) -> None:
    assert discover(tmp_path, source, NO_CHECKS, **environ) == hosts


def test_a_host_that_does_not_answer_is_left_out_and_explained(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as answering:
        port = answering.getsockname()[1]
        words = ("static", "127.0.0.2:1,127.0.0.3:1", "--ssh-port", port)
        assert discover(tmp_path, *words) == "127.0.0.2:1\n"
        table = discover(tmp_path, *words, "--explain").splitlines()
    told = {line.split()[0]: line.split()[2] for line in table[1:]}
    assert told == {"127.0.0.2": "used", "127.0.0.3": "unhealthy"}


def test_the_pods_of_a_kubernetes_cluster(tmp_path: Path) -> None:
    api = KubernetesApi()
    with api.running():
        api.add(pod("one", ip="10.0.0.1"))
        api.add(pod("two", ip="10.0.0.2"))
        api.add(pod("three", ip="10.0.0.3", ready=False))
        words = ("kubernetes", "--selector", "app=train", "--timeout", "60s", NO_CHECKS)
        found = discover(tmp_path, *words, **kubeconfig(tmp_path / "config", api.url))
    assert sorted(found.splitlines()) == ["10.0.0.1:1", "10.0.0.2:1"]


@pytest.mark.skipif(not (PROGRAMS / "mpirun").exists(), reason="this environment has no mpirun")
@pytest.mark.parametrize("options", ["--oversubscribe", "--oversubscribe --tag-output --display-map"])
def test_the_hosts_that_mpirun_uses(options: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    environ = {**ROOT_MAY_USE_MPI, "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])}
    command = f"mpirun -np 3 {options}"
    found = discover(tmp_path, "mpi", "--mpirun", command, "--timeout", "120s", NO_CHECKS, **environ)
    assert found == f"{socket.gethostname()}:3\n"
