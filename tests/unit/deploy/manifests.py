"""The manifests of ``deploy/kubernetes``, and the pods that a cluster's controllers make of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.kubernetes_api import pod

FOLDER = Path(__file__).parents[3] / "deploy" / "kubernetes"
JOBS = ("job.yaml", "mpijob.yaml")

Document = dict[str, Any]


def documents(name: str = "*.yaml") -> Iterator[Document]:
    """All documents of a file, or of all files."""
    for path in sorted(FOLDER.glob(name)):
        yield from yaml.safe_load_all(path.read_text())


def document(kind: str) -> Document:
    """The one document of a kind."""
    (found,) = (each for each in documents() if each["kind"] == kind)
    return found


@dataclass(frozen=True)
class Parts:
    """The parts of a file's job.

    Attributes:
        launcher: the launcher's pod template.
        worker: the workers' pod template.
        pods: the pods of both, as the API has them when they are ready.
        names: what the cluster's DNS calls the workers, in the namespace ``default``.
    """

    launcher: Document
    worker: Document
    pods: list[Document]
    names: list[str]


def parts(name: str) -> Parts:
    """The parts of a file's job."""
    return {"job.yaml": _plain, "mpijob.yaml": _mpi}[name]()


def _plain() -> Parts:
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


def _mpi() -> Parts:
    """As the MPI operator makes pods: with labels of its own, and a headless Service of the job's name."""
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
