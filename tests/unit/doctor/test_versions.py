from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from hvdrecover.doctor import facts
from hvdrecover.doctor.facts import Horovod, HostFacts
from hvdrecover.doctor.findings import Finding
from hvdrecover.doctor.versions import judge, judge_horovod

VERSIONS = {
    "python": "3.11.7",
    "hvdrecover": "0.1.0",
    "torch": "2.13.0",
    "tensorflow": None,
    "horovod": "0.28.1+hvdrecover.x",
}
OURS = Horovod({"torch": "2.13.0+cpu"}, {"gloo": True, "mpi": True}, [])
HOST = HostFacts("h1", "/env/bin/python", VERSIONS, OURS, {"lo": "127.0.0.1"}, 0, 1, False, 1)


def horovod(built: Horovod | None = OURS, features: dict[str, bool] | None = None, gpus: int = 0) -> Finding:
    return judge_horovod({"h1": replace(HOST, horovod=built, gpus=gpus)}, {"torch": features or {}})


def test_the_same_everywhere() -> None:
    found = judge({"h1": HOST, "h2": HOST})
    assert found.outcome == "ok"
    assert found.what.endswith("torch 2.13.0, horovod 0.28.1+hvdrecover.x on all 2 hosts")
    assert found.facts["hosts"]["h2"]["executable"] == "/env/bin/python"


def test_what_differs_is_named_with_the_hosts() -> None:
    other = replace(HOST, versions={**VERSIONS, "torch": "2.12.1", "tensorflow": "2.21.0"})
    found = judge({"h1": HOST, "h2": other, "h3": HOST})
    assert found.outcome == "failure"
    assert found.what == "torch: 2.13.0 on h1, h3, 2.12.1 on h2; tensorflow: none on h1, h3, 2.21.0 on h2"
    assert found.at_fault == ("h2",)


def test_what_most_hosts_have_is_what_a_job_needs_and_of_two_what_the_first_has() -> None:
    bare = replace(HOST, versions={**VERSIONS, "horovod": None}, horovod=None)
    assert judge({"h1": bare, "h2": HOST, "h3": HOST}).at_fault == ("h1",)
    assert judge_horovod({"h1": bare, "h2": HOST, "h3": HOST}, {}).outcome == "ok"
    assert judge({"h1": HOST, "h2": bare}).at_fault == ("h2",)


def test_a_framework_is_needed() -> None:
    found = judge({"h1": replace(HOST, versions={**VERSIONS, "torch": None})})
    assert (found.outcome, found.what) == ("failure", "neither torch nor tensorflow is installed on h1")


def test_our_horovod_is_well() -> None:
    found = horovod(features={"gloo": True, "mpi": False, "nccl": False, "cuda": False})
    assert found.outcome == "ok"
    assert "built for torch 2.13.0+cpu, with Gloo, without MPI, NCCL, CUDA" in found.what
    assert found.facts["ours"]


@pytest.mark.parametrize(
    ("built", "features", "gpus", "outcome", "words"),
    [
        (None, {}, 0, "failure", "not installed on h1"),
        (replace(OURS, built_for={}), {}, 0, "failure", "not built for torch"),
        (
            replace(OURS, built_for={"torch": "2.12.0"}),
            {},
            0,
            "failure",
            "built for torch 2.12.0, and 2.13.0",
        ),
        (OURS, {"gloo": False}, 0, "failure", "without Gloo"),
        (replace(OURS, lacks=["stall-inspector"]), {}, 0, "warning", "stall-inspector"),
        (OURS, {"nccl": False}, 2, "warning", "without NCCL"),
    ],
)
def test_what_is_wrong_with_a_horovod(
    built: Horovod | None, features: dict[str, bool], gpus: int, outcome: str, words: str
) -> None:
    found = horovod(built, features, gpus)
    assert found.outcome == outcome
    assert words in found.what
    assert "hvdrecover install-horovod" in found.remedy


def test_the_facts_of_this_host() -> None:
    gathered = facts.gather(4711)
    assert gathered.interfaces["lo"] == "127.0.0.1"
    assert gathered.memory > 0 and gathered.port == 4711
    assert gathered.versions["numpy"] if "numpy" in gathered.versions else gathered.versions["hvdrecover"]


def test_the_fixes_of_the_installed_horovod_are_found() -> None:
    pytest.importorskip("horovod")
    found = facts.horovod()
    assert found is not None
    assert found.lacks == []
    assert found.noted["gloo"]


def test_a_horovod_of_another_origin_lacks_what_its_files_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    file = tmp_path / "horovod" / "runner" / "js_run.py"
    file.parent.mkdir(parents=True)
    file.write_text("from shutil import which as find_executable\n")
    stock = metadata.PathDistribution(tmp_path / "horovod-0.28.1.dist-info")
    monkeypatch.setattr(metadata, "distribution", lambda name: stock)
    found = facts.horovod()
    assert found is not None
    assert {"stall-inspector", "gloo-iface", "registry", "host-order"} <= set(found.lacks)
    assert not {"c++20", "relative-rpath", "no-distutils-runner", "torch-wait"} & set(found.lacks)
    assert (found.built_for, found.noted) == ({}, {})


def test_where_nothing_is_reached_there_is_no_route() -> None:
    assert facts.route_to("127.0.0.1") == ("lo", "127.0.0.1")
    assert facts.route_to("255.255.255.255") == ("", "")
