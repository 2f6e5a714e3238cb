"""Lists of batch systems."""

import pytest

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.batch import lsf, pbs, sge
from hvdrecover.errors import DiscoveryError

SOURCES = {
    "LSB_DJOB_HOSTFILE": lsf,
    "LSB_MCPU_HOSTS": lsf,
    "LSB_HOSTS": lsf,
    "PBS_NODEFILE": pbs,
    "PE_HOSTFILE": sge,
}
IN_FILES = ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE", "PE_HOSTFILE")


@pytest.fixture
def discovered(tmp_path):
    """Discovers with a variable that is set to these contents, or to a file that has them."""

    def discover(variable, contents, **more):
        path = tmp_path / variable
        path.write_text(contents, newline="")
        environ = {variable: str(path) if variable in IN_FILES else contents, **more}
        return SOURCES[variable](environ, 1.0)

    return discover


@pytest.mark.parametrize(
    ("variable", "contents"),
    [
        ("LSB_MCPU_HOSTS", "c1 3 c2 2"),
        ("LSB_HOSTS", "c1 c1 c1 c2 c2"),
        ("LSB_DJOB_HOSTFILE", "c1\r\nc1\nc2\nc1\nc2\n"),
        ("PBS_NODEFILE", "c1\nc2\nc1\nc2\nc1\n"),
    ],
)
def test_a_host_may_be_named_once_per_slot(discovered, variable, contents):
    assert discovered(variable, contents) == [Host("c1", 3), Host("c2", 2)]


def test_grid_engine_adds_up_the_queues_of_a_host(discovered):
    contents = "node1 4 all.q@node1 UNDEFINED\nnode2 2 all.q@node2 0,0:0,1\nnode1 1 big.q@node1 <NULL>\n"
    assert discovered("PE_HOSTFILE", contents) == [Host("node1", 5), Host("node2", 2)]


@pytest.mark.parametrize("source", [lsf, pbs, sge])
def test_outside_of_a_job_the_error_names_the_variable(source):
    with pytest.raises(DiscoveryError, match=r"^(LSB_HOSTS|\w+_NODEFILE|PE_HOSTFILE): is not set"):
        source({}, 1.0)


@pytest.mark.parametrize(
    ("variable", "contents", "problem"),
    [
        ("LSB_MCPU_HOSTS", "a 1 b", "'b': slots .* got ''"),
        ("LSB_MCPU_HOSTS", "a 1 b c", "got 'c'"),
        ("PBS_NODEFILE", "a\n b/0\n", "'b/0' "),
        ("PE_HOSTFILE", "a 1 q x\n\nb\nc 1 q x\n", "'b': slots .* got ''"),
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
