"""Hosts that are pods of a Kubernetes cluster."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdrecover.discovery.hosts import Host, check_count
from hvdrecover.discovery.sources import source
from hvdrecover.errors import DiscoveryError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where pods find their service account
_CLUSTER, _KUBECONFIG = "KUBERNETES_SERVICE_HOST", "KUBECONFIG"
# Kubeflow's training operator has MPI, and so Horovod, start processes by kubectl instead of ssh.
_AGENT, _KUBECTL_AGENT = "OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh"
_PAGE = 500  # pods in one answer of the API server
_SHARE = 0.9  # of the time that requests may take, so that there is some left to say which one has hung
_QUANTITY = re.compile(r"([0-9]{1,18})(m?)")

Pod = Mapping[str, Any]  # as the API returns it


@source(
    every=10.0,  # the official client takes a second or two of a core to import, each time
    variables=(_CLUSTER, "KUBERNETES_SERVICE_PORT", _KUBECONFIG, _AGENT),
    if_empty="check --selector and --namespace: a missing namespace looks empty, too",
    selector="labels of the workers' pods, such as app=train",
    namespace="namespace of the pods; else that of the credentials, or 'default'",
    resource="a slot for each of these that a pod has, such as nvidia.com/gpu",
    annotation="annotation of pods that says their slots",
    context="context of the kubeconfig; else this pod's cluster, or the current",
)
def kubernetes(
    environ: Mapping[str, str],
    timeout: float,
    *,
    selector: str,
    namespace: str = "",
    resource: str = "",
    annotation: str = "",
    context: str = "",
) -> list[Host]:
    """Pods of a Kubernetes cluster: those with certain labels that are ready and are to stay."""
    if not selector.strip():
        problem = "is empty; name labels that only the job's workers have, such as app=train"
        raise DiscoveryError("--selector", problem)
    if resource and annotation:
        raise DiscoveryError("--annotation", "slots cannot come from --resource, too; leave out one of them")
    try:
        from kubernetes import client
    except ImportError as error:
        problem = f"its client cannot be imported ({error}); pip install 'hvdrecover[kubernetes]'"
        raise DiscoveryError("Kubernetes", problem) from error
    deadline = time.monotonic() + timeout * _SHARE
    # The client writes keys to files, and this process may end without its cleaning up.
    with tempfile.TemporaryDirectory(prefix="hvdrecover-") as folder:
        configuration = client.Configuration()
        configuration.retries = False  # discovery asks again soon anyway
        default = _log_in(configuration, context, environ, folder)
        with client.ApiClient(configuration) as api:
            pods = _pods(api, namespace or default, selector, deadline)
    return hosts_of(pods, resource, annotation, by_pod_name=environ.get(_AGENT) == _KUBECTL_AGENT)


def hosts_of(
    pods: Iterable[Pod], resource: str = "", annotation: str = "", *, by_pod_name: bool = False
) -> list[Host]:
    """Return the hosts of the pods that are ready, oldest first.

    Pods without the resource or the annotation that says their slots are skipped. Raises `DiscoveryError` if
    a pod's slots are no number, if it cannot be reached, or if no pod says its slots.
    """
    ready = sorted((pod for pod in pods if _is_ready(pod)), key=_age)
    hosts: dict[str, Host] = {}
    names: dict[str, str] = {}
    for pod in ready:
        slots = _devices(pod, resource) if resource else _annotated(pod, annotation) if annotation else None
        if slots is None and (resource or annotation):
            continue
        name = _name(pod)
        host = name if by_pod_name else _address(pod)
        if host in hosts:
            pair = f"pods {names[host]} and {name}"
            raise DiscoveryError(pair, f"both are {host}; select only one of them")
        hosts[host], names[host] = Host(host, slots), name
    if ready and not hosts:
        lacks = f"asks for the resource '{resource}'" if resource else f"has the annotation '{annotation}'"
        raise DiscoveryError(f"pod {_name(ready[0])}", f"neither it nor any other that is ready {lacks}")
    return list(hosts.values())


def _is_ready(pod: Pod) -> bool:
    if pod["metadata"].get("deletionTimestamp") or pod["status"].get("phase") != "Running":
        return False
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions") or []}
    # A pod is marked before it is preempted or evicted; a node that shuts down does not even delete its pods.
    return conditions.get("Ready") == "True" and conditions.get("DisruptionTarget") != "True"


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def _age(pod: Pod) -> tuple[str, list[str | int]]:
    """Return a key that sorts pods by age; for pods of the same second, worker-2 comes before worker-10."""
    words = re.split(r"([0-9]+)", _name(pod))
    return pod["metadata"]["creationTimestamp"], [int(word) if word.isdecimal() else word for word in words]


def _address(pod: Pod) -> str:
    spec, status = pod["spec"], pod["status"]
    if spec.get("hostname") and spec.get("subdomain"):
        return f"{spec['hostname']}.{spec['subdomain']}.{pod['metadata']['namespace']}.svc"
    addresses = [each["ip"] for each in status.get("podIPs") or []] or [status.get("podIP", "")]
    if found := next((address for address in addresses if "." in address), ""):
        return str(found)
    problem = (
        "has no IPv4 address, and Horovod cannot use others; give it a hostname and a headless "
        "service's name as subdomain"
    )
    raise DiscoveryError(f"pod {_name(pod)}", problem)


def _devices(pod: Pod, resource: str) -> int | None:
    """Return how much of a resource all containers of a pod have; None if none asks for it."""
    total = 0  # thousandths
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        match = _QUANTITY.fullmatch(amounts.get(resource, "0"))
        if match is None:
            problem = f"has {amounts[resource]} of '{resource}', which cannot be counted in slots"
            raise DiscoveryError(f"pod {_name(pod)}", problem)
        total += int(match[1]) * (1 if match[2] else 1000)
    return _count(pod, str(total // 1000), f"resource '{resource}'") if total >= 1000 else None


def _annotated(pod: Pod, annotation: str) -> int | None:
    """Return the slots that an annotation of a pod says; None if it has none."""
    text = (pod["metadata"].get("annotations") or {}).get(annotation)
    return None if text is None else _count(pod, text.strip(), f"annotation '{annotation}'")


def _count(pod: Pod, text: str, place: str) -> int:
    if problem := check_count(text):
        raise DiscoveryError(f"pod {_name(pod)}", f"{place}: {problem}")
    return int(text)


def _log_in(configuration: Any, context: str, environ: Mapping[str, str], folder: str) -> str:
    """Read credentials into the client's configuration, and say the namespace that goes with them."""
    from kubernetes import config
    from kubernetes.config.incluster_config import InClusterConfigLoader

    in_cluster = not context and _CLUSTER in environ
    path = str(_ACCOUNT) if in_cluster else environ.get(_KUBECONFIG) or "~/.kube/config"
    try:
        if in_cluster:
            loader = InClusterConfigLoader(str(_ACCOUNT / "token"), str(_ACCOUNT / "ca.crt"), environ=environ)
            loader.load_and_set(configuration)
            return (_ACCOUNT / "namespace").read_text().strip()
        config.load_kube_config(path, context or None, configuration, temp_file_path=folder)
        contexts, current = config.list_kube_config_contexts(path)
        used = next((each for each in contexts if each["name"] == context), current)
        return used["context"].get("namespace") or "default"
    except Exception as error:  # a malformed file makes the client raise errors of any kind
        text = str(error) if isinstance(error, config.ConfigException) else f"{type(error).__name__}: {error}"
        remedy = f"name a working kubeconfig in {_KUBECONFIG}; kubectl get pods tells"
        if in_cluster:
            remedy = "let the pod have its service account's token, or name a --context of a kubeconfig"
        raise DiscoveryError(path, f"there are no usable credentials ({text}); {remedy}") from error


def _pods(client: Any, namespace: str, selector: str, deadline: float) -> list[Pod]:
    """Return all pods of a namespace that have these labels, in whatever state.

    Raises:
        DiscoveryError: the server does not answer, or not with a list of pods.
    """
    from kubernetes.client import CoreV1Api
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

    api, url = CoreV1Api(client), str(client.configuration.host)
    found: list[Pod] = []
    token = None
    while True:
        left = max(0.01, deadline - time.monotonic())
        try:
            # A pair of times, as older clients ignore a fraction of a second. Skip the client's models of
            # pods: to build them takes much longer than the server does.
            answer = api.list_namespaced_pod(
                namespace,
                label_selector=selector,
                limit=_PAGE,
                _continue=token,
                _preload_content=False,
                _request_timeout=(left, left),
            )
            page = json.loads(answer.data)
            found += page["items"]
            token = page["metadata"].get("continue")
        except ApiException as error:
            raise DiscoveryError(url, f"{_advice(error.status, namespace)} ({_said(error)})") from error
        except HTTPError as error:
            # For urllib3, a failed connection is a timeout, too.
            late = isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError)
            problem = "has not answered in time" if late else f"can't be reached: {error}"
            raise DiscoveryError(url, f"the API server {problem}") from error
        except (ValueError, KeyError, TypeError) as error:
            problem = "its answer is not JSON with a list of pods; is it the API server of Kubernetes?"
            raise DiscoveryError(url, problem) from error
        if not token:
            return found


def _advice(status: int, namespace: str) -> str:
    """Return the meaning of an HTTP status; 0 stands for a failed secure connection."""
    known = {
        0: "there is no secure connection to the API server; is its certificate authority known?",
        400: "the API server does not understand the question; is the --selector right?",
        401: "the API server does not accept the credentials; kubectl get pods tells which do",
        403: f"the credentials need a Role with the verb 'list' for pods in namespace '{namespace}'",
        404: "no pods are known here; is it the API server of Kubernetes?",
    }
    return known.get(status, f"the API server has failed with status {status}")


def _said(error: Any) -> str:
    """The reason that the API server gives."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(str(error.reason).split())
