"""The software on the hosts: whether it is the same everywhere, and which Horovod it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdrecover.doctor.facts import HostFacts
from hvdrecover.doctor.findings import Finding, failure, ok, warning

_VERSIONS = "versions"
_HOROVOD = "horovod"
_FRAMEWORKS = ("torch", "tensorflow")
_INSTALL = "Run `hvdrecover install-horovod`"


def judge(hosts: Mapping[str, HostFacts]) -> Finding:
    """Return whether what a job needs is installed, in the same version on all hosts."""
    facts = {host: {**each.versions, "executable": each.executable} for host, each in hosts.items()}
    differing = _differing({host: each.versions for host, each in hosts.items()})
    host, first = usual(hosts)
    if differing:
        remedy = "Install the same on all hosts; the ranks of a job must run the same code."
        others = [name for name, each in hosts.items() if each.versions != first.versions]
        return failure(_VERSIONS, "; ".join(differing), remedy, at_fault=others, hosts=facts)
    if not any(first.versions[framework] for framework in _FRAMEWORKS):
        remedy = "Install one: `pip install 'hvdrecover[torch]'` or `pip install 'hvdrecover[tensorflow]'`."
        return failure(_VERSIONS, f"neither torch nor tensorflow is installed on {host}", remedy, hosts=facts)
    everywhere = f" on all {len(hosts)} hosts" if len(hosts) > 1 else ""
    shown = ", ".join(f"{package} {version}" for package, version in first.versions.items() if version)
    return ok(_VERSIONS, shown + everywhere, hosts=facts)


def usual(hosts: Mapping[str, HostFacts]) -> tuple[str, HostFacts]:
    """Return the first of the hosts that most others have the versions of."""
    alike = {
        host: sum(each.versions == other.versions for other in hosts.values()) for host, each in hosts.items()
    }
    return max(hosts.items(), key=lambda item: alike[item[0]])


def _differing(versions: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """A line for each package that is not the same on all hosts."""
    packages = dict.fromkeys(package for each in versions.values() for package in each)
    lines = []
    for package in packages:
        where: dict[str | None, list[str]] = {}
        for host, each in versions.items():
            where.setdefault(each.get(package), []).append(host)
        if len(where) > 1:
            told = (f"{version or 'none'} on {', '.join(names)}" for version, names in where.items())
            lines.append(f"{package}: {', '.join(told)}")
    return lines


def judge_horovod(hosts: Mapping[str, HostFacts], built: Mapping[str, Mapping[str, bool]]) -> Finding:
    """Return how Horovod was built, and what it lacks.

    Args:
        hosts: the hosts.
        built: framework to what its part of Horovod says is built in, of those that could be imported.
    """
    host, first = usual(hosts)
    horovod = first.horovod
    if horovod is None:
        return failure(
            _HOROVOD, f"it is not installed on {host}", f"{_INSTALL}, which builds and installs it."
        )
    features = dict(horovod.noted)
    for each in built.values():
        features.update(each)
    facts: dict[str, Any] = {
        "version": first.versions["horovod"],
        "ours": "hvdrecover" in str(first.versions["horovod"]),
        "built_for": horovod.built_for,
        "features": features,
        "lacks": horovod.lacks,
        "gpus": {name: each.gpus for name, each in hosts.items()},
    }
    if others := _built_for_others(first):
        remedy = f"{_INSTALL}, which builds it for what is installed now."
        return failure(_HOROVOD, "; ".join(others), remedy, **facts)
    if not features.get("gloo", True):
        remedy = f"{_INSTALL} without HOROVOD_WITHOUT_GLOO: elastic jobs need it."
        return failure(_HOROVOD, "it is built without Gloo", remedy, **facts)
    if horovod.lacks:
        what = f"{first.versions['horovod']} lacks fixes that recovery relies on: {', '.join(horovod.lacks)}"
        remedy = f"{_INSTALL} --rebuild; hvdrecover/install/edits/ says what goes wrong without each."
        return warning(_HOROVOD, what, remedy, **facts)
    if any(each.gpus for each in hosts.values()) and not features.get("nccl", True):
        remedy = "Set HOROVOD_GPU_OPERATIONS=NCCL and run `hvdrecover install-horovod --rebuild`."
        return warning(_HOROVOD, "there are GPUs, and it is built without NCCL", remedy, **facts)
    return ok(_HOROVOD, _described(first, features), **facts)


def _built_for_others(host: HostFacts) -> list[str]:
    """A line for each installed framework that Horovod was not built for."""
    assert host.horovod is not None
    lines = []
    for framework in _FRAMEWORKS:
        installed, built = host.versions[framework], host.horovod.built_for.get(framework)
        if installed and not built:
            lines.append(f"it is not built for {framework}, which is installed")
        elif installed and built and _release(installed) != _release(built):
            lines.append(f"it is built for {framework} {built}, and {installed} is installed")
    return lines


def _release(version: str) -> str:
    """A version without its local part, which a framework may leave out when it names itself."""
    return version.partition("+")[0]


def _described(host: HostFacts, features: Mapping[str, bool]) -> str:
    assert host.horovod is not None
    frameworks = " and ".join(f"{name} {version}" for name, version in host.horovod.built_for.items())
    names = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA"}
    having = [name for feature, name in names.items() if features.get(feature)]
    lacking = [name for feature, name in names.items() if features.get(feature) is False]
    without = f", without {', '.join(lacking)}" if lacking else ""
    return f"built for {frameworks}, with {', '.join(having)}{without}; it has all of hvdrecover's fixes"
