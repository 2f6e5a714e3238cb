import json

import pytest

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.lists import tf_config
from hvdrecover.errors import DiscoveryError

CLUSTER = {"chief": ["a:2222"], "worker": ["b:2222", "a:2223", "b:2223"], "ps": ["c:1"], "evaluator": ["d:1"]}


def discovered(config):
    return tf_config({"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)}, 1.0)


def test_those_that_train_have_a_slot_for_each_of_their_tasks():
    assert discovered({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}) == [
        Host("a", 2),
        Host("b", 2),
    ]


@pytest.mark.parametrize("config", [{"cluster": CLUSTER}, CLUSTER])
def test_a_file_may_hold_a_cluster_alone(tmp_path, config):
    path = tmp_path / "cluster.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(config, indent=2).replace("\n", "\r\n").encode())
    assert tf_config({"TF_CONFIG": "not looked at"}, 1.0, path=str(path)) == [Host("a", 2), Host("b", 2)]


@pytest.mark.parametrize(
    "config", [{}, [], "3", {"task": {"index": 0}}, {"cluster": ["a:1"]}, {"ps": ["a:1"]}]
)
def test_no_cluster(config):
    with pytest.raises(DiscoveryError, match=r'^TF_CONFIG: .* {"cluster": {"worker": '):
        discovered(config)


@pytest.mark.parametrize(
    ("worker", "problem"),
    [
        ([":1"], "':1' .*host"),
        (["grpc://a:1"], "'grpc://a"),
        (["[::1]:2222"], r"'\[::1\]' .*IPv6"),
        (["::1"], "'.*' .*IPv6"),
        ([3], '^TF_CONFIG: must .* {"cluster": {"worker": '),
        ({"5": None}, "^TF_CONFIG: must "),
    ],
)
def test_addresses_that_can_not_be_meant(worker, problem):
    with pytest.raises(DiscoveryError, match=problem):
        discovered({"cluster": {"worker": worker}})
