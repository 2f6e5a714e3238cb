"""The files of ``deploy/kubernetes`` fit Kubernetes, what they start, and each other."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
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
from hvdrecover.discovery.sources import Source
from tests.fakes.kubernetes_api import TOKEN, KubernetesApi, pod

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
    pods: list[Document]  # of both, as the API has them when they are ready
    names: list[str]  # of the workers in the cluster's DNS, in the namespace ``default``


def plain_job() -> Parts:
    """As StatefulSets and Jobs make pods; a headless Service gives names to those that it selects."""
    service, workers, job = (document(kind) for kind in ("Service", "StatefulSet", "Job"))
    worker, launcher = workers["spec"]["template"], job["spec"]["template"]
    assert workers["spec"]["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    domain, name, count = (
        service["metadata"]["name"],
        workers["metadata"]["name"],
        workers["spec"]["replicas"],
    )
    assert workers["spec"]["serviceName"] == domain
    pods = [_pod(worker, f"{name}-{number}", domain, {}) for number in range(count)]
    pods.append(_pod(launcher, f"{job['metadata']['name']}-x7k2p", "", {}))
    return Parts(launcher, worker, pods, [f"{name}-{number}.{domain}.default.svc" for number in range(count)])


def mpi_job() -> Parts:
    """As the MPI operator makes pods: with its own labels, and a headless Service of the job's name."""
    job = document("MPIJob")
    domain, replicas = job["metadata"]["name"], job["spec"]["mpiReplicaSpecs"]
    worker, launcher = (replicas[role]["template"] for role in ("Worker", "Launcher"))
    name, count = f"{domain}-worker", replicas["Worker"]["replicas"]
    prefix = "training.kubeflow.org"
    labels = {f"{prefix}/operator-name": "mpi-operator", f"{prefix}/job-name": domain}
    of_workers, of_launcher = ({**labels, f"{prefix}/job-role": role} for role in ("worker", "launcher"))
    pods = [_pod(worker, f"{name}-{number}", domain, of_workers) for number in range(count)]
    pods.append(_pod(launcher, f"{domain}-launcher-x7k2p", domain, of_launcher))
    return Parts(launcher, worker, pods, [f"{name}-{number}.{domain}.default.svc" for number in range(count)])


def _pod(template: Document, name: str, domain: str, labels: dict[str, str]) -> Document:
    return pod(
        name,
        labels={**template.get("metadata", {}).get("labels", {}), **labels},
        containers=[each.get("resources", {}) for each in template["spec"]["containers"]],
        **({"hostname": name, "subdomain": domain} if domain else {}),
    )


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


def source(job: Parts) -> Source:
    """Return the source that the launcher asks for hosts."""
    found, _ = discovering.parse(discovering.request(command_line(job).discover, []))
    return found


# Kubernetes.


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


# Host discovery.


@each_job
def test_discovery_finds_the_workers_and_the_role_allows_just_that(job: Parts, tmp_path: Path) -> None:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
    }
    with KubernetesApi().running() as api:
        api.add(*job.pods)
        config["clusters"] = [{"name": "c", "cluster": {"server": api.url}}]
        (tmp_path / "config").write_text(json.dumps(config))
        hosts = source(job)({"KUBECONFIG": str(tmp_path / "config")}, 60.0)
    assert [host.name for host in hosts] == job.names

    asked = {re.fullmatch(r"/api/v1/namespaces/[^/]+/([^/?]+)\?.*", each) for each in api.requests}
    verbs = {("", match[1], "list") for match in asked if match}
    assert None not in asked
    (rule,) = document("Role")["rules"]
    assert {
        (group, resource, verb)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    } == verbs
    account, binding = document("ServiceAccount")["metadata"]["name"], document("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (
        "Role",
        document("Role")["metadata"]["name"],
    )
    assert job.launcher["spec"]["serviceAccountName"] == account

    slots = int(container(job.worker)["resources"]["limits"][GPU])
    assert [host.slots for host in hosts] == [slots] * len(hosts)
    arguments = command_line(job)
    assert arguments.processes == slots * len(hosts)
    assert arguments.least == slots  # any one host will do
    assert GPU not in container(job.launcher)["resources"]["limits"]


# How pods end.


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


# Files and memory.


def test_metrics_are_those_of_the_job() -> None:
    job = plain_job().launcher
    (metrics,) = job["spec"]["initContainers"]
    assert metrics["image"] == container(job)["image"]
    program, *words = metrics["args"]
    assert program == "hvdrecover"
    arguments = cli.parsed(words)
    (events,) = container(job)["env"]
    assert arguments.folder == Path(events["value"])
    assert arguments.watch
    assert arguments.prometheus[1] == metrics["ports"][0]["containerPort"]


# The image.


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, and what follows each."""
    lines = (line for line in (FOLDER / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", " ")
    words: list[Any] = [line.split(maxsplit=1) for line in text.splitlines() if line]
    return [(name, " ".join(rest.split())) for name, rest in words]


def test_the_image_is_of_files_extras_and_programs_that_exist() -> None:
    by_name: dict[str, list[str]] = {}
    for name, rest in instructions():
        by_name.setdefault(name, []).append(rest)
    for paths in by_name["COPY"]:
        assert all((FOLDER.parents[1] / path).exists() for path in paths.split()[:-1])
    (extras,) = re.findall(r"/src\[([a-z0-9,]+)\]", " ".join(by_name["RUN"]))
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    assert "kubernetes" in extras.split(",")
    assert by_name["ENTRYPOINT"] == ['["tini", "--"]']
    installed = {
        word for command in by_name["RUN"] if "apt-get install" in command for word in command.split()
    }
    assert {"openssh-server", "openssh-client", "tini", "procps"} <= installed
    stages = [rest.rpartition(" AS ")[2] for rest in by_name["FROM"]]
    assert stages == ["cpu", "cuda", "${DEVICE}"]
