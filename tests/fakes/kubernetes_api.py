"""A small Kubernetes API server, over real HTTP on the loopback: it lists pods, and knows who may."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

HOST = "127.0.0.1"
TOKEN = "a-token"
_PATH = re.compile(r"/api/v1/namespaces/([^/]+)/pods")


def pod(name: str, *, labels: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """A pod that runs and is ready, as the API has it, with changes in its status, spec and metadata."""
    metadata = {
        "name": name,
        "namespace": "default",
        "labels": {"app": "train"} if labels is None else labels,
        "creationTimestamp": changes.pop("created", "2026-01-01T00:00:00Z"),
    }
    if "deleted" in changes:
        metadata["deletionTimestamp"] = changes.pop("deleted")
    spec: dict[str, Any] = {
        "containers": [
            {"name": f"container-{number}", "image": "image", "resources": resources}
            for number, resources in enumerate(changes.pop("containers", [{}]))
        ]
    }
    spec |= {key: changes.pop(key) for key in ("hostname", "subdomain") if key in changes}
    status = {
        "phase": changes.pop("phase", "Running"),
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if changes.pop("ready", True) else "False"},
        ],
    }
    if "disrupted" in changes:
        status["conditions"].append({"type": "DisruptionTarget", "status": changes.pop("disrupted")})
    ip = changes.pop("ip", "10.0.0.1")
    status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    assert not changes, changes
    return {"metadata": metadata, "spec": spec, "status": status}


def kubeconfig(path: Path, url: str, namespace: str | None = None) -> dict[str, str]:
    """Write a kubeconfig with the contexts `here`, the current one, and `there`; its variable."""
    context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
    config = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [
            {"name": "here", "context": context},
            {"name": "there", "context": {**context, "namespace": "there"}},
        ],
    }
    path.write_text(json.dumps(config))
    return {"KUBECONFIG": str(path)}


class KubernetesApi:
    """The server."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, dict[str, Any]]] = {"default": {}}  # by namespace and name
        self.readable = {"default"}  # the namespaces whose pods the token's owner may list
        # Asked about the path of every request first: the status and body of the answer, or None.
        self.fault: Callable[[str], tuple[int, bytes] | None] = lambda path: None
        self.requests: list[str] = []  # paths and queries
        self.port = 0
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{HOST}:{self.port}"

    def add(self, *pods: dict[str, Any], namespace: str = "default") -> None:
        """Create pods, or put others in their place."""
        for each in pods:
            each["metadata"]["namespace"] = namespace
            self.pods.setdefault(namespace, {})[each["metadata"]["name"]] = each

    @contextmanager
    def running(self, certificate: Path | None = None) -> Iterator[KubernetesApi]:
        """Serve, over TLS if there is a file with a key and a certificate."""
        server = ThreadingHTTPServer((HOST, 0), self._handler())
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            self.scheme = "https"
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, request: str, authorization: str | None) -> tuple[int, bytes]:
        """The status and the body with which a request is answered."""
        self.requests.append(request)
        parts = urlsplit(request)
        if (fault := self.fault(parts.path)) is not None:
            return fault
        if (authorization or "").lower() != f"bearer {TOKEN}":
            return _refusal(401, "Unauthorized")
        match = _PATH.fullmatch(parts.path)
        if match is None:
            return _refusal(404, "the server could not find the requested resource")
        namespace = match[1]
        if namespace not in self.readable:
            message = (
                f'pods is forbidden: User "me" cannot list resource "pods" in the namespace "{namespace}"'
            )
            return _refusal(403, message)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        wanted = dict(part.split("=") for part in query["labelSelector"].split(","))
        # As in a cluster, a namespace that isn't there has no pods, and pods are in the order of their names.
        pods = [
            each
            for _, each in sorted(self.pods.get(namespace, {}).items())
            if wanted.items() <= each["metadata"]["labels"].items()
        ]
        return 200, json.dumps(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        ).encode()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = api.answer(self.path, self.headers["Authorization"])
                with suppress(ConnectionError):  # of a client that has not waited
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def _refusal(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"kind": "Status", "code": status, "message": message}).encode()
