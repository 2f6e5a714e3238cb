"""The files of ``deploy/kubernetes`` fit Kubernetes, what they start, and each other."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hvdrecover import cli, config
from hvdrecover.cli import discovering, launching, options
from hvdrecover.config import FENCED, PREEMPTED

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.37")  # of Kubernetes: in the first, podFailurePolicy became stable
GPU = "nvidia.com/gpu"
Document = dict[str, Any]


def documents() -> Iterator[Document]:
    for path in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(path.read_text())


def document(kind: str) -> Document:
    """The one document of a kind."""
    (found,) = (each for each in documents() if each["kind"] == kind)
    return found


@dataclass(frozen=True)
class Parts:
    """The parts of a file's job."""

    launcher: Document  # pod template
    worker: Document  # pod template
    labels: dict[str, str]  # of the workers' pods
    workers: int


def plain_job() -> Parts:
    """Return a Job and a StatefulSet, whose pods get names by a headless Service that selects them."""
    service, workers, job = (document(kind) for kind in ("Service", "StatefulSet", "Job"))
    worker = workers["spec"]["template"]
    labels = worker["metadata"]["labels"]
    assert workers["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"
    assert workers["spec"]["serviceName"] == service["metadata"]["name"]
    return Parts(job["spec"]["template"], worker, labels, workers["spec"]["replicas"])


def mpi_job() -> Parts:
    """Return an MPIJob, whose pods get their labels from the MPI operator."""
    job = document("MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    prefix = "training.kubeflow.org"
    labels = {f"{prefix}/job-name": job["metadata"]["name"], f"{prefix}/job-role": "worker"}
    return Parts(launcher["template"], worker["template"], labels, worker["replicas"])


each_job = pytest.mark.parametrize(
    "job", [pytest.param(plain_job(), id="job.yaml"), pytest.param(mpi_job(), id="mpijob.yaml")]
)


def container(template: Document) -> Document:
    (only,) = template["spec"]["containers"]
    return only


def command_line(job: Parts) -> argparse.Namespace:
    """The launcher's command, as `hvdrecover` understands it."""
    program, *words = container(job.launcher)["args"]
    assert program == "hvdrecover"
    arguments = cli.parsed(words)
    launching.check_values(arguments.others)
    return arguments


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_fit_the_schemas_of_kubernetes(version: str) -> None:
    kinds = set()
    for each in documents():
        kinds.add(each["kind"])
        if each["kind"] != "MPIJob":
            kubernetes_validate.validate(each, version, strict=True)
            continue
        for replicas in each["spec"]["mpiReplicaSpecs"].values():
            template = {"apiVersion": "v1", "kind": "PodTemplate", "template": replicas["template"]}
            kubernetes_validate.validate(template, version, strict=True)
    assert kinds >= {"MPIJob", "Job", "StatefulSet", "Service", "Role", "PersistentVolumeClaim"}


@each_job
def test_discovery_selects_the_workers_and_the_role_allows_it(job: Parts) -> None:
    arguments = command_line(job)
    source, _ = discovering.parse(discovering.request(arguments.discover, []))
    selected = dict(label.split("=") for label in source.options["selector"].split(",")).items()
    assert selected <= job.labels.items()
    assert not selected <= job.launcher.get("metadata", {}).get("labels", {}).items()

    (rule,) = document("Role")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    account, binding = document("ServiceAccount")["metadata"]["name"], document("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    role = document("Role")["metadata"]["name"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role)
    assert job.launcher["spec"]["serviceAccountName"] == account

    assert source.options["resource"] == GPU
    slots = int(container(job.worker)["resources"]["limits"][GPU])
    assert arguments.processes == slots * job.workers
    assert arguments.least == slots  # any one host will do
    assert GPU not in container(job.launcher)["resources"]["limits"]


@each_job
def test_pods_are_given_the_time_that_processes_take_to_leave(job: Parts) -> None:
    grace = config.read(options.given(command_line(job))).grace
    for template in (job.worker, job.launcher):
        assert template["spec"]["terminationGracePeriodSeconds"] >= grace + 30
    assert container(job.worker)["lifecycle"] == {"preStop": {"exec": {"command": ["leave-host"]}}}


def test_exit_codes_mean_to_kubernetes_what_they_mean_to_us() -> None:
    rules = document("Job")["spec"]["podFailurePolicy"]["rules"]
    codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert codes == {PREEMPTED: "Ignore", FENCED: "FailJob", 2: "FailJob"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give processes a process table of their own")
def test_leave_host_ends_guardians_and_waits_for_them(tmp_path: Path) -> None:
    """Under both names of the command, and only them: not the shell that sshd starts them by."""
    for program in ("pkill", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    hvdrecover = Path(sys.executable).with_name("hvdrecover")
    options = "worker --grace 20 --no-standby -- sleep 1000"
    script = f"""
        ({sys.executable} -m hvdrecover {options}; echo module $? >> ended) &
        sh -c '{sys.executable} {hvdrecover} {options}; echo script $? >> ended' &
        while [ $(pgrep -c -x sleep) -lt 2 ]; do sleep 0.05; done
        {FOLDER / "leave-host"} && pgrep -c -x sleep > left
        wait"""
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
    with socket.create_server(("127.0.0.1", 0)) as supervisor:  # which says nothing
        address = f"127.0.0.1/{supervisor.getsockname()[1]}:token"
        environ = {**os.environ, "HVDRECOVER_EVENTS": "events", "HVDRECOVER_SUPERVISOR": address}
        subprocess.run(space, cwd=tmp_path, check=True, timeout=120, env=environ)
    assert (tmp_path / "left").read_text() == "0\n"
    assert sorted((tmp_path / "ended").read_text().splitlines()) == [
        f"module {PREEMPTED}",
        f"script {PREEMPTED}",
    ]
