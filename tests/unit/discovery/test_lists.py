"""Lists of hosts that people and programs write, in variables and files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.discovery.lists import command, lsf, mpi, parse, pbs, sge, tf_config
from hvdrecover.discovery.sources import MOST_SLOTS, Host, check
from hvdrecover.errors import DiscoveryError, HostListError
from hvdrecover.texts import printable


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_hosts_are_read_in_every_form(end: str, mark: str) -> None:
    lines = ["a:4", "", "  b-1.x slots = 2 max_slots=99 # the second", "# none", "c\t", "d slots=4096"]
    text = mark + end.join(lines)
    expected = [Host("a", 4), Host("b-1.x", 2), Host("c"), Host("d", MOST_SLOTS)]
    assert parse(text, "hosts") == parse(text.encode(), "hosts") == expected


@given(st.binary() | st.text("ab:4 \t\r\n#=slots[].-@\ufeff\x00").map(str.encode))
def test_whatever_is_read_are_hosts_or_an_error_with_its_place(data: bytes) -> None:
    try:
        found = parse(data, "hosts")
    except HostListError as error:
        assert error.line >= 1
        assert str(error) == printable(f"hosts: line {error.line}: {error.problem}")
    else:
        names = [host.name for host in found]
        assert len(set(names)) == len(names)
        assert not any(check(host.name, host.slots) for host in found)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a:0", "line 1: .* got '0'"),
        ("a\n  b slots=-1", "line 2: .* got '-1'"),
        ("a:2.5", "line 1: .*integer .* got '2.5'"),
        ("a:٣", "line 1: .*integer .* got '٣'"),
        ("a:99999", "line 1: .*4096, got '99999'"),
        ("a\nb\na:2", "line 3: 'a' is named twice"),
        ("::1", "line 1: '::1' .*IPv6"),
        ("[::1]:4", r"line 1: '\[::1\]:4' .*IPv6"),
        ("nowhere;touch${IFS}x;:1", r"line 1: '.*' .*not a valid"),
        ("[$(touch)]:1", r"line 1: '\[\$\(touch\)\]:1' .*not a valid"),
        ("me@a:2", "line 1: 'me@a' .*user"),
        ("a b", "line 1: .*'b'.*slots=N"),
        ("a slots=1 slots=2", "line 1: .*'a' .*two"),
        ("a" * 254, f"line 1: '{'a' * 254}' "),
        (b"a\r\nb\xff", "line 2: byte 0xff "),
    ],
)
def test_what_can_not_be_meant(text: str | bytes, fact: str) -> None:
    with pytest.raises(HostListError, match=f"^hosts: {fact}"):
        parse(text, "hosts")


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


def test_a_command_without_a_program_is_an_error():
    with pytest.raises(DiscoveryError, match=r"^command: names no program"):
        command({}, 1.0, command=())


def test_a_file_may_hold_a_cluster_alone(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CLUSTER, indent=2).replace("\n", "\r\n").encode())
    found = tf_config({"TF_CONFIG": "not looked at"}, 1.0, path=str(path))
    assert found == [Host("c1", 3), Host("c2", 2)]


def test_without_an_mpirun_the_error_says_how_to_name_one(tmp_path):
    environ = {"PATH": str(tmp_path), "OMPI_MCA_orte_default_hostfile": "none"}
    with pytest.raises(DiscoveryError, match=r"^'mpirun -np 3': .* PATH; .* --mpirun /path/to/mpirun"):
        mpi(environ, 1.0, mpirun="mpirun -np 3")
