"""Hosts that are pods of a Kubernetes cluster."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from hvdrecover.discovery.sources import Host, check, source
from hvdrecover.errors import DiscoveryError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where pods find their service account
_CLUSTER, _KUBECONFIG = "KUBERNETES_SERVICE_HOST", "KUBECONFIG"
_SHARE = 0.9  # of the time that the request may take, so that there is some left to say that it has hung
Pod = Mapping[str, Any]  # as the API returns it


@source(
    every=10.0,  # the official client takes a second or two of a core to import, each time
    variables=(_CLUSTER, "KUBERNETES_SERVICE_PORT", _KUBECONFIG),
    if_empty="check --selector and --namespace: a missing namespace looks empty, too",
    selector="labels of the workers' pods, such as app=train",
    namespace="namespace of the pods; else that of the credentials, or 'default'",
    resource="a slot for each of these that a pod has, such as nvidia.com/gpu",
    context="context of the kubeconfig; else this pod's cluster, or the current",
)
def kubernetes(
    environ: Mapping[str, str],
    timeout: float,
    *,
    selector: str,
    namespace: str = "",
    resource: str = "",
    context: str = "",
) -> list[Host]:
    """Pods of a Kubernetes cluster: those with certain labels that are ready and are to stay."""
    if not selector.strip():
        problem = "is empty; name labels that only the job's workers have, such as app=train"
        raise DiscoveryError("--selector", problem)
    try:
        from kubernetes import client
    except ImportError as error:
        problem = f"its client cannot be imported ({error}); pip install 'hvdrecover[kubernetes]'"
        raise DiscoveryError("Kubernetes", problem) from error
    # The client writes keys to files, and this process may end without its cleaning up.
    with tempfile.TemporaryDirectory(prefix="hvdrecover-") as folder:
        configuration = client.Configuration()
        configuration.retries = False  # discovery asks again soon anyway
        default = _log_in(configuration, context, environ, folder)
        with client.ApiClient(configuration) as api:
            pods = _pods(api, namespace or default, selector, timeout * _SHARE)
    return hosts_of(pods, resource)


def hosts_of(pods: Iterable[Pod], resource: str = "") -> list[Host]:
    """Return the hosts of the ready pods, the oldest first; pods without the resource are skipped."""
    ready = [pod for pod in pods if _is_ready(pod)]
    ready.sort(key=lambda pod: (pod["metadata"]["creationTimestamp"], _name(pod)))
    hosts = []
    for pod in ready:
        slots = _slots(pod, resource)
        if slots == 0:
            continue
        host = _address(pod)
        if problem := check(host, slots):
            raise DiscoveryError(f"pod {_name(pod)}", problem)
        hosts.append(Host(host, slots))
    if ready and not hosts:
        lacks = f"neither it nor any other that is ready asks for the resource '{resource}'"
        raise DiscoveryError(f"pod {_name(ready[0])}", lacks)
    return hosts


def _is_ready(pod: Pod) -> bool:
    if pod["metadata"].get("deletionTimestamp") or pod["status"].get("phase") != "Running":
        return False
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions") or []}
    # A pod is marked before it is preempted or evicted; a node that shuts down does not even delete its pods.
    return conditions.get("Ready") == "True" and conditions.get("DisruptionTarget") != "True"


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


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


def _slots(pod: Pod, resource: str) -> int | None:
    if not resource:
        return None
    from kubernetes.utils import parse_quantity

    total = Decimal(0)
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        total += parse_quantity(amounts.get(resource, 0))
    return int(total)


def _log_in(configuration: Any, context: str, environ: Mapping[str, str], folder: str) -> str:
    """Read credentials into the client's configuration; return their namespace."""
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
        remedy = f"name a working kubeconfig in {_KUBECONFIG}, or give the pod its service account's token"
        raise DiscoveryError(path, f"there are no usable credentials ({error}); {remedy}") from error


def _pods(client: Any, namespace: str, selector: str, timeout: float) -> list[Pod]:
    from kubernetes.client import CoreV1Api
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    url = str(client.configuration.host)
    try:
        # A pair of times, as older clients ignore a fraction of a second. The client's models of pods are
        # skipped: to build them takes much longer than the server does.
        answer = CoreV1Api(client).list_namespaced_pod(
            namespace, label_selector=selector, _preload_content=False, _request_timeout=(timeout, timeout)
        )
        return list(json.loads(answer.data)["items"])
    except ApiException as error:
        problem = f"the API server has failed with status {error.status} ({_said(error)})"
        if error.status == 403:
            need = f"a Role with the verb 'list' for pods in namespace '{namespace}'"
            problem += f". The credentials need {need}"
    except HTTPError as error:
        problem = f"the API server can't be reached: {error}"
    except (ValueError, KeyError, TypeError):
        problem = "its answer is not JSON with a list of pods; is it the API server of Kubernetes?"
    raise DiscoveryError(url, problem)


def _said(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(str(error.reason).split())
