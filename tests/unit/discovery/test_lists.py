"""Hosts that stand in a variable or a file: batch systems, Open MPI's hostfile, TF_CONFIG."""

import json

import pytest

from hvdrecover.discovery.lists import lsf, mpi, pbs, sge, tf_config
from hvdrecover.discovery.sources import Host
from hvdrecover.errors import DiscoveryError

SOURCES = {
    "LSB_DJOB_HOSTFILE": lsf,
    "LSB_MCPU_HOSTS": lsf,
    "LSB_HOSTS": lsf,
    "PBS_NODEFILE": pbs,
    "PE_HOSTFILE": sge,
    "OMPI_MCA_orte_default_hostfile": mpi,
    "PRTE_MCA_prte_default_hostfile": mpi,
    "TF_CONFIG": tf_config,
}
IN_FILES = [name for name in SOURCES if name.endswith(("FILE", "file"))]
QUEUES = "c1 2 all.q@c1 UNDEFINED\nc2 2 all.q@c2 0,0:0,1\nc1 1 big.q@c1 <NULL>\n"
CLUSTER = {"chief": ["c1:22"], "worker": ["c2:2222", "c1:2223", "c2:2223", "c1:1"], "ps": ["c:1"]}


@pytest.fixture
def discovered(tmp_path):
    """Discovers with a variable that is set to these contents, or to a file that has them."""

    def discover(variable, contents):
        path = tmp_path / variable
        path.write_text(contents, newline="")
        return SOURCES[variable]({variable: str(path) if variable in IN_FILES else contents}, 1.0)

    return discover


@pytest.mark.parametrize(
    ("variable", "contents"),
    [
        ("LSB_MCPU_HOSTS", "c1 3 c2 2"),
        ("LSB_HOSTS", "c1 c1 c1 c2 c2"),
        ("LSB_DJOB_HOSTFILE", "c1\r\nc1\nc2\nc1\nc2\n"),
        ("PBS_NODEFILE", "c1\nc2\nc1\nc2\nc1\n"),
        ("PE_HOSTFILE", QUEUES),
        ("OMPI_MCA_orte_default_hostfile", "# of the launcher\nc1 slots=3\nc2 slots=2 max_slots=4\n"),
        ("PRTE_MCA_prte_default_hostfile", "c1:3\nc2:2\n"),
        ("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "ps", "index": 0}})),
        (
            "TF_CONFIG",
            json.dumps({"worker": {"0": "c1:1", "1": "c1:2", "4": "c1:3", "5": "c2", "6": "c2:1"}}),
        ),
    ],
)
def test_hosts_have_the_slots_that_the_list_says(discovered, variable, contents):
    assert discovered(variable, contents) == [Host("c1", 3), Host("c2", 2)]


@pytest.mark.parametrize(
    ("variable", "contents", "problem"),
    [
        ("LSB_MCPU_HOSTS", "a 1 b", "'b': slots .* got ''"),
        ("LSB_MCPU_HOSTS", "a 1 b c", "got 'c'"),
        ("PBS_NODEFILE", "a\n b/0\n", "'b/0' "),
        ("PE_HOSTFILE", "a 1 q x\n\nb\nc 1 q x\n", "'b': slots .* got ''"),
        ("TF_CONFIG", "{", "is not JSON"),
        *[
            ("TF_CONFIG", config, 'must name .* {"cluster": {"worker": ')
            for config in ("{}", "[]", "3", '{"cluster": ["a:1"]}', '{"ps": ["a:1"]}', '{"worker": [3]}')
        ],
        ("TF_CONFIG", '{"worker": ["grpc://a:1"]}', "'grpc://a"),
        ("TF_CONFIG", '{"worker": ["[::1]:2222"]}', r"'\[::1\]' .*IPv6"),
    ],
)
def test_an_error_names_the_variable_and_the_word(discovered, variable, contents, problem):
    with pytest.raises(DiscoveryError, match=f"^{variable}: .*{problem}"):
        discovered(variable, contents)


@pytest.mark.parametrize("variable", IN_FILES)
def test_a_file_that_is_empty_or_not_there_is_an_error(discovered, variable, tmp_path):
    with pytest.raises(DiscoveryError, match=f"^{variable}: .*{tmp_path}"):
        discovered(variable, "\n")
    with pytest.raises(DiscoveryError, match=f"^{variable}: {tmp_path}/away .*No such file"):
        SOURCES[variable]({variable: str(tmp_path / "away")}, 1.0)


@pytest.mark.parametrize("source", [lsf, pbs, sge, tf_config])
def test_a_variable_that_is_not_set_is_named(source):
    with pytest.raises(DiscoveryError, match=r"^(LSB_HOSTS|\w+_NODEFILE|PE_HOSTFILE|TF_CONFIG): is not set"):
        source({}, 1.0)


def test_a_file_may_hold_a_cluster_alone(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CLUSTER, indent=2).replace("\n", "\r\n").encode())
    found = tf_config({"TF_CONFIG": "not looked at"}, 1.0, path=str(path))
    assert found == [Host("c1", 3), Host("c2", 2)]


def test_without_an_mpirun_the_error_says_how_to_name_one(tmp_path):
    environ = {"PATH": str(tmp_path), "OMPI_MCA_orte_default_hostfile": "none"}
    with pytest.raises(DiscoveryError, match=r"^'mpirun -np 3': .* PATH; .* --mpirun /path/to/mpirun"):
        mpi(environ, 1.0, mpirun="mpirun -np 3")
