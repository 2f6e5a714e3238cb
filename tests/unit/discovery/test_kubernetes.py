"""Pods as hosts: the official client asks a small API server over HTTP."""

import datetime
import ipaddress
import re

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hvdrecover.discovery import kubernetes as source
from hvdrecover.discovery.kubernetes import hosts_of, kubernetes
from hvdrecover.discovery.sources import Host
from hvdrecover.errors import DiscoveryError
from tests.fakes.kubernetes_api import HOST, TOKEN, KubernetesApi, kubeconfig, pod

PATIENT = 60.0  # seconds, for what does not hang


@pytest.fixture
def api(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with KubernetesApi().running() as server:
        yield server


@pytest.fixture
def environ(api, tmp_path):
    return kubeconfig(tmp_path / "config", api.url)


def ask(environ, **options):
    return kubernetes(environ, PATIENT, **{"selector": "app=train", **options})


def names(environ, **options):
    return [host.name for host in ask(environ, **options)]


def problem(environ, **options):
    with pytest.raises(DiscoveryError) as caught:
        ask(environ, **options)
    return str(caught.value)


def test_the_namespace_is_the_one_said_else_that_of_the_context_else_default(api, tmp_path):
    api.readable |= {"here", "there", "said"}
    for number, namespace in enumerate(["default", "here", "there", "said"]):
        api.add(pod("a", ip=f"10.0.0.{number}"), namespace=namespace)
    plain = kubeconfig(tmp_path / "plain", api.url)
    assert names(plain) == ["10.0.0.0"]
    environ = kubeconfig(tmp_path / "config", api.url, namespace="here")
    assert names(environ) == ["10.0.0.1"]
    assert names(environ, context="there") == ["10.0.0.2"]
    assert names(environ, context="there", namespace="said") == ["10.0.0.3"]


def write_certificate(folder):
    """Write a key and a self-signed certificate to `both.pem`, the certificate alone to `ca.crt`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api")])
    address = x509.IPAddress(ipaddress.ip_address(HOST))
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(private + public)
    (folder / "ca.crt").write_bytes(public)


def test_in_a_pod_its_service_account_asks_about_its_namespace(tmp_path, monkeypatch):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("mine")
    write_certificate(tmp_path)
    monkeypatch.setattr(source, "_ACCOUNT", tmp_path)
    with KubernetesApi().running(tmp_path / "both.pem") as server:
        server.readable = {"mine"}
        server.add(pod("a", ip="10.0.0.7"), namespace="mine")
        environ = {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": str(server.port)}
        assert names(environ) == ["10.0.0.7"]
        write_certificate(tmp_path)  # of another authority
        asked = len(server.requests)
        assert "CERTIFICATE_VERIFY_FAILED" in problem(environ)
        assert len(server.requests) == asked


def test_what_the_credentials_lack_is_named(api, environ):
    text = problem(environ, namespace="theirs")
    assert re.search("""User "me" cannot list resource "pods".* Role .*'list' .*pods .*'theirs'""", text)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, b'{"message": "etcd has no leader"}', "500 (etcd has no leader)"),
        (200, b"<html>", "JSON"),
        (200, b'{"items": null, "metadata": {}}', "list of pods"),
    ],
)
def test_answers_that_are_none(api, environ, status, body, expected):
    api.fault = lambda path: (status, body)
    text = problem(environ)
    assert text.startswith(api.url)
    assert expected in text


def test_pods_are_hosts_only_while_they_are_ready_and_are_to_stay():
    pods = [pod("pending", ip="10.0.0.9", phase="Pending"), pod("running"), pod("ended", phase="Failed")]
    leaving = {"ready": False}, {"deleted": "2026-01-02T00:00:00Z"}, {"disrupted": "True"}
    pods += [pod("leaving", ip="10.0.0.9", **changes) for changes in leaving]
    without = pod("without", ip="10.0.0.9")
    del without["status"]["conditions"]
    assert hosts_of([*pods, without]) == [Host("10.0.0.1")]


def test_the_oldest_comes_first():
    pods = [
        pod("b", ip="10.0.0.2"),
        pod("a", ip="10.0.0.3", created="2026-01-01T00:00:01Z"),
        pod("z", ip="10.0.0.4", created="2025-12-31T23:59:59Z"),
    ]
    assert [host.name for host in hosts_of(pods)] == ["10.0.0.4", "10.0.0.2", "10.0.0.3"]


def test_workers_of_an_mpijob_have_the_names_of_its_discover_hosts_script():
    worker = pod("job-worker-0", hostname="job-worker-0", subdomain="job-worker")
    assert hosts_of([worker]) == [Host("job-worker-0.job-worker.default.svc")]


GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("containers", "slots"),
    [
        ([{"requests": {GPU: "2"}, "limits": {"cpu": "8"}}], 2),
        ([{"limits": {GPU: "4"}}, {"limits": {"cpu": "1"}}, {"limits": {GPU: "1"}}, {}], 5),
        ([{"limits": {GPU: "1500m"}}, {"limits": {GPU: "2500m"}}], 4),
    ],
)
def test_slots_of_a_resource(containers, slots):
    assert hosts_of([pod("a", containers=containers)], resource=GPU) == [Host("10.0.0.1", slots)]


def test_a_resource_that_no_pod_has_is_an_error():
    pods = [pod("a", containers=[{"limits": {GPU: "4"}}]), pod("b", ip="10.0.0.2")]
    with pytest.raises(DiscoveryError, match=r"^pod a: .* resource 'amd.com/gpu'"):
        hosts_of(pods, resource="amd.com/gpu")
    assert hosts_of([], resource=GPU) == []
