"""The judgement of how hosts compute, from what was measured on each of their processors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hvdrecover.doctor.compute import judge
from hvdrecover.doctor.findings import Finding

Devices = list[dict[str, Any]]


def cpu(number: int = 0, **others: Any) -> dict[str, Any]:
    """Return a measurement of a CPU that is well."""
    well = {
        "device": f"CPU {number}",
        "kind": "EPYC, numpy 2",
        "products": 40,
        "wrong": 0,
        "bits": {"aaaa": 40},
        "seconds": 0.004,
        "share": 0.99,
    }
    return {**well, **others}


def gpu(number: int = 0, **others: Any) -> dict[str, Any]:
    """Return a measurement of a GPU that is well."""
    return cpu(
        **{"device": f"GPU {number}", "kind": "H100, torch 2", "bits": {"ffff": 9}, "share": None, **others}
    )


def only(hosts: dict[str, Devices]) -> Finding:
    (found,) = judge(hosts)
    return found


def test_hosts_that_are_well() -> None:
    found = only({"h1": [cpu(0), cpu(1), gpu()], "h2": [cpu(0), cpu(1), gpu()]})
    assert (found.outcome, found.at_fault) == ("ok", ())
    assert found.what == (
        "480 matrix products on 6 processors are right, and alike on all of a kind; "
        "a CPU takes 4 ms and a GPU takes 4 ms for one"
    )
    assert found.facts["hosts"]["h1"][0]["seconds"] == 0.004


def test_a_product_that_is_wrong_names_the_host_and_its_processor_even_if_there_is_no_other() -> None:
    found = only({"h1": [cpu(0), cpu(1, wrong=1, bits={"aaaa": 39, "bbbb": 1})]})
    assert (found.outcome, found.at_fault) == ("failure", ("h1",))
    assert found.what == "computed wrongly: h1: CPU 1 (1 of 40 products)"
    assert "tested" in found.remedy


def test_a_processor_whose_process_dies_is_wrong() -> None:
    died = {"device": "CPU 1", "kind": "EPYC, numpy 2", "ended": "SIGILL"}
    found = only({"h1": [cpu(0)], "h2": [cpu(0), died]})
    assert (found.outcome, found.at_fault) == ("failure", ("h2",))
    assert re.search(r" h2: CPU 1 \(.* SIGILL\)$", found.what)


@pytest.mark.parametrize("bits", [{"bbbb": 40}, {"aaaa": 39, "bbbb": 1}])
def test_other_bits_than_most_of_its_kind(bits: dict[str, int]) -> None:
    found = only({"h1": [cpu()], "h2": [cpu(bits=bits)], "h3": [cpu()]})
    assert (found.outcome, found.at_fault) == ("failure", ("h2",))
    assert found.what == "other bits than most processors of their kind: h2: CPU 0"
    assert "OPENBLAS_CORETYPE" in found.remedy


def test_of_two_hosts_with_different_bits_neither_is_to_blame() -> None:
    found = only({"h1": [cpu()], "h2": [cpu(bits={"bbbb": 40})]})
    assert (found.outcome, found.at_fault) == ("warning", ())
    assert found.what == "processors of one kind compute different bits: h1: aaaa; h2: bbbb"


def test_who_computes_wrongly_has_no_vote_on_the_bits() -> None:
    found = only({"h1": [cpu()], "h2": [cpu(wrong=3, bits={"bbbb": 40})]})
    assert (found.outcome, found.at_fault) == ("failure", ("h2",))


def test_each_processor_has_one_vote_however_fast_it_is() -> None:
    fast = cpu(bits={"bbbb": 4000})
    found = only({"h1": [cpu()], "h2": [fast], "h3": [cpu()]})
    assert found.at_fault == ("h2",)


def test_hosts_of_different_kinds_are_not_compared() -> None:
    other = cpu(kind="Xeon, numpy 2", bits={"bbbb": 40}, seconds=0.1)
    assert only({"h1": [cpu()], "h2": [other]}).outcome == "ok"


@pytest.mark.parametrize(("seconds", "outcome"), [(0.0059, "ok"), (0.0061, "warning"), (0.012, "failure")])
def test_a_host_that_is_slow_for_its_kind(seconds: float, outcome: str) -> None:
    found = only({"h1": [cpu()], "h2": [cpu(seconds=seconds)], "h3": [cpu(seconds=0.0035)]})
    assert found.outcome == outcome
    assert found.at_fault == (("h2",) if outcome == "failure" else ())
    if outcome == "failure":
        assert found.what == "far too slow for their kind: h2: CPUs with 3.0 times the median's time"


def test_of_two_the_slower_one_is_slow() -> None:
    for hosts in ({"h1": [cpu()], "h2": [cpu(seconds=0.4)]}, {"h2": [cpu(seconds=0.4)], "h1": [cpu()]}):
        assert only(hosts).at_fault == ("h2",)


def test_one_slow_cpu_among_many_is_noise_and_one_slow_gpu_is_not() -> None:
    cpus = [cpu(number) for number in range(8)]
    assert only({"h1": cpus, "h2": [*cpus[:7], cpu(7, seconds=0.04)]}).outcome == "ok"
    gpus = [gpu(number) for number in range(8)]
    found = only({"h1": gpus, "h2": [*gpus[:7], gpu(7, seconds=0.04)]})
    assert found.at_fault == ("h2",)
    assert found.what.endswith("h2: GPU 7 with 10.0 times the median's time")


def test_a_busy_host_is_told_of_and_not_called_slow() -> None:
    found = only({"h1": [cpu()], "h2": [cpu(0, share=0.2, seconds=0.4), cpu(1, share=0.6, seconds=0.4)]})
    assert (found.outcome, found.at_fault) == ("warning", ())
    assert found.what == "something else takes the time of their CPUs: h2: a job would get 40%"


def test_of_many_processors_a_few_are_named() -> None:
    found = only({"h1": [cpu(number, wrong=1) for number in range(64)]})
    assert found.what.endswith("CPU 3 (1 of 40 products), 60 more")


def test_all_that_is_wrong_is_told() -> None:
    found = judge({"h1": [cpu()], "h2": [cpu(wrong=1)], "h3": [cpu(seconds=0.02)], "h4": [cpu()]})
    assert [each.at_fault for each in found] == [("h2",), ("h3",)]
