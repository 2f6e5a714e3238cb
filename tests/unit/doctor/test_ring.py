from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hvdrecover.doctor import ranks
from hvdrecover.doctor.ranks import MARK, MOST_RANKS, SIZES, contribution, expected, measure
from hvdrecover.doctor.ring import Launched, bus_bandwidth, judge, judge_mpi, understood


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_sum_is_what_ranks_add(size: int) -> None:
    total = np.sum([contribution(rank, 1000) for rank in range(size)], axis=0, dtype=np.float64)
    np.testing.assert_array_equal(total, expected(size, 1000))


def test_float32_holds_the_sum_of_as_many_ranks_as_may_be() -> None:
    assert 2**24 > expected(MOST_RANKS, 1000).max() > 2**23
    exact = MOST_RANKS * (np.arange(1000) % 251) + MOST_RANKS * (MOST_RANKS + 1) // 2
    np.testing.assert_array_equal(expected(MOST_RANKS, 1000).astype(np.int64), exact)


def test_a_sum_that_is_right() -> None:
    found = measure(lambda values: values * 1, 0, 1, 4096)
    assert (found["bytes"], found["wrong"], found["first_wrong"]) == (4096, 0, None)
    assert found["seconds"] > 0
    assert found["digest"] == measure(lambda values: values + 0, 0, 1, 4096)["digest"]


def test_one_wrong_element_is_found_and_so_is_nan() -> None:
    def flipped(values: ranks.Values) -> ranks.Values:
        total = values.copy()
        total[17] += 1
        total[999] = np.nan
        return total

    found = measure(flipped, 0, 1, 4096)
    assert (found["wrong"], found["first_wrong"]) == (2, [17, 19.0, 18.0])


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth(2, 10**9, 1.0) == 10**9
    assert bus_bandwidth(4, 10**9, 0.5) == 3 * 10**9
    assert bus_bandwidth(1, 10**9, 1.0) == 0


def told(rank: int, seconds: float = 0.1, digest: str = "d", wrong: int = 0) -> dict[str, Any]:
    first = [3, 1.0, 2.0] if wrong else None
    sums = [
        {"bytes": size, "seconds": seconds, "wrong": wrong, "first_wrong": first, "digest": digest}
        for size in SIZES
    ]
    return {"kind": "summed", "by": "torch", "host": f"h{rank + 1}", "rank": rank, "size": 2, "sums": sums}


def launched(
    *sums: dict[str, Any], by: str = "torch", ending: str = "", log: tuple[str, ...] = ()
) -> Launched:
    return Launched(by, 2, {}, {each["rank"]: each for each in sums}, ending, log)


def test_what_ranks_tell_is_found_between_other_lines() -> None:
    first = {"kind": "imported", "by": "torch", "host": "h1", "built": {"gloo": True}}
    log = (
        f"[0]<stdout>:\n[0]<stdout>:{MARK}{json.dumps(first)}\n[1]<stderr>:a warning\n"
        f'[1,1]<stdout>:{MARK}{json.dumps(told(1))}\n[0]<stdout>:{MARK}{{"kind": "summ\n'
    )
    found = understood("torch", 2, log, "it ended with exit code 1")
    assert found.built == {"gloo": True}
    assert found.sums == {1: told(1)}
    assert found.log[0] == "[1]<stderr>:a warning"


def test_the_cause_is_shown_whatever_another_rank_says_after_it() -> None:
    cause = "[0]<stderr>:ImportError: libfabric.so is gone"
    log = "\n".join(["[0]<stderr>:Traceback", cause, *["[1]<stderr>:  File"] * 40, "[1]<stderr>:Terminated"])
    found = understood("torch", 2, log, "it ended with exit code 1")
    assert found.log[-1] == cause
    assert judge(found, None).what.endswith("exit code 1: ImportError: libfabric.so is gone")


def test_right_sums_with_the_bandwidth_of_the_slowest_rank_beside_mpis() -> None:
    mpi = launched(told(0), told(1, 0.2), by="mpi4py")
    found = judge(launched(told(0, 0.1), told(1, 0.4)), mpi)
    assert found.outcome == "ok"
    bandwidth = SIZES[-1] / 0.4
    assert f"bus bandwidth {bandwidth / 1e9:.2f} GB/s (mpi4py: {bandwidth * 2 / 1e9:.2f} GB/s)" in found.what
    assert found.facts["sums"][-1]["bus_bytes_per_second"] == pytest.approx(bandwidth)
    assert found.facts["hosts"] == {0: "h1", 1: "h2"}
    assert "mpi4py" not in judge(launched(told(0), told(1)), None).what


def test_a_wrong_sum_names_rank_host_and_element() -> None:
    for verdict in (
        judge(launched(told(0), told(1, wrong=5)), None),
        judge_mpi(launched(told(0), told(1, wrong=5))),
    ):
        assert verdict.outcome == "failure"
        elements = SIZES[0] // 4
        assert verdict.what.startswith(
            f"rank 1 on h2: 5 of {elements} elements of the sum are wrong, the first at 3: 1 instead of 2"
        )
        assert "rank 0" not in verdict.what


def test_a_sum_that_is_not_mpis_bit_for_bit() -> None:
    mpi = launched(told(0, digest="e"), told(1, digest="e"), by="mpi4py")
    found = judge(launched(told(0, digest="e"), told(1, digest="d")), mpi)
    assert found.outcome == "failure"
    assert "rank 1 on h2: its sum differs from mpi4py's" in found.what


def test_ranks_that_are_missing_are_a_failure_for_horovod_and_not_for_mpi() -> None:
    lacking = launched(told(0), ending="it ended with exit code 1", log=("ImportError: libx", "", "----"))
    found = judge(lacking, None)
    assert (found.outcome, found.facts["sums"]) == ("failure", [])
    assert found.what == "1 of 2 ranks have summed, it ended with exit code 1: ImportError: libx"
    assert found.facts["log"] == ["ImportError: libx", "", "----"]
    assert judge_mpi(lacking).outcome == "skipped"
    words = (
        "[0]<stdout>:hello",
        "[1]<stderr>:ImportError: libx is gone",
        "Process 0 exit with status code 143.",
    )
    assert judge(launched(log=words, ending="it ended"), None).what.endswith(": ImportError: libx is gone")
    late = launched(told(0), told(1), ending="it had not ended after 150 s")
    assert judge(late, None).outcome == "failure"


def test_known_complaints_have_remedies_of_their_own() -> None:
    for words, remedy in (
        ("could not connect to some hosts via ssh", "ssh"),
        ("Unable to find a set of common task-to-task communication interfaces", "--network-interface"),
    ):
        assert remedy in judge(launched(log=(words,), ending="it ended"), None).remedy


def test_a_rank_ends_when_nobody_reads_what_it_prints() -> None:
    code = "from hvdrecover.doctor import ranks; print(flush=True); ranks._end_when_alone()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert rank.poll() is None
        rank.stdout.close()
        assert rank.wait(60) == 1
