"""Lists of batch systems; mpirun itself is in tests/integration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources import mpi
from hvdrecover.discovery.sources.mpi import Mpi
from hvdrecover.discovery.sources.mpi_ranks import MARK
from hvdrecover.errors import DiscoveryError, HostListError

A_SLOT = ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE")
OPEN_MPI = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
IN_FILES = (*A_SLOT, "PE_HOSTFILE", *OPEN_MPI)


@pytest.fixture
def discovered(tmp_path):
    """Discovers with a variable set, to a file with these contents if it is one that names a file."""

    def discover(variable, contents, **more):
        path = tmp_path / variable
        path.write_text(contents, newline="")
        return Mpi().hosts({variable: str(path) if variable in IN_FILES else contents, **more}, 1.0)

    return discover


def test_lsf_hosts_and_slots_by_turns(discovered):
    assert discovered("LSB_MCPU_HOSTS", "grid03 1 grid05 1 grid01 2") == [
        Host("grid03", 1),
        Host("grid05", 1),
        Host("grid01", 2),
    ]


@pytest.mark.parametrize(
    ("variable", "contents"),
    [
        ("LSB_MCPU_HOSTS", "batch2 1 c1 42 c2 42"),
        ("LSB_HOSTS", " ".join(["batch2", *["c1"] * 42, *["c2"] * 42])),
        ("LSB_DJOB_HOSTFILE", "\n".join(["batch2", *["c1"] * 42, *["c2"] * 42])),
    ],
)
def test_lsf_with_csm_names_its_launch_node_first(discovered, variable, contents):
    assert discovered(variable, contents, CSM_ALLOCATION_ID="7") == [Host("c1", 42), Host("c2", 42)]
    assert len(discovered(variable, contents)) == 3


def test_lsf_with_csm_and_a_compute_node_first(discovered):
    assert len(discovered("LSB_MCPU_HOSTS", "c1 42 c2 42", CSM_ALLOCATION_ID="7")) == 2
    assert len(discovered("LSB_MCPU_HOSTS", "c1 1", CSM_ALLOCATION_ID="7")) == 1


def test_grid_engine_adds_up_the_queues_of_a_host(discovered):
    contents = "node1 4 all.q@node1 UNDEFINED\nnode2 2 all.q@node2 0,0:0,1\nnode1 1 big.q@node1 <NULL>\n"
    assert discovered("PE_HOSTFILE", contents) == [Host("node1", 5), Host("node2", 2)]


@pytest.mark.parametrize("variable", OPEN_MPI)
def test_open_mpi_has_a_hostfile(discovered, variable):
    contents = "# of the launcher\njob-worker-0.job slots=2\njob-worker-1.job slots=1 max_slots=4\nc\n"
    expected = [Host("job-worker-0.job", 2), Host("job-worker-1.job", 1), Host("c", None)]
    assert discovered(variable, contents) == expected


def test_the_batch_system_knows_better_than_a_default_hostfile(discovered, tmp_path):
    (tmp_path / "hostfile").write_text("other slots=1\n")
    found = discovered("PBS_NODEFILE", "a\n", OMPI_MCA_orte_default_hostfile=str(tmp_path / "hostfile"))
    assert found == [Host("a", 1)]


@pytest.mark.parametrize(
    ("variable", "contents", "place"),
    [
        ("LSB_MCPU_HOSTS", "a 1 b", "line 1, column 5: 'b' "),
        ("LSB_MCPU_HOSTS", "a 1 b c", "line 1, column 7: 'c' "),
        ("LSB_MCPU_HOSTS", "a " + 5000 * "9", "line 1, column 3: '9+' "),
        ("LSB_MCPU_HOSTS", "a 0", "line 1, column 3: '0' "),
        ("LSB_MCPU_HOSTS", "::1 2", "line 1, column 1: '::1' .*IPv6"),
        ("PBS_NODEFILE", "a\n b/0\n", "line 2, column 2: 'b/0' "),
        ("PE_HOSTFILE", "a 1 q x\n\nb\nc 1 q x\n", "line 3, column 1: 'b' "),
        ("PE_HOSTFILE", "a -1 q x\n", "line 1, column 3: '-1' "),
        (OPEN_MPI[0], "a slots=0\n", "line 1, column 9: 0 "),
    ],
)
def test_an_error_names_line_and_column(discovered, variable, contents, place):
    with pytest.raises(HostListError, match=place):
        discovered(variable, contents)


@pytest.mark.parametrize("variable", IN_FILES)
def test_a_file_that_is_empty_or_not_there_is_an_error(discovered, variable, tmp_path):
    with pytest.raises(DiscoveryError, match=f"^{variable}: .*{tmp_path}"):
        discovered(variable, "\n")
    with pytest.raises(DiscoveryError, match=f"^{variable}: {tmp_path}/away .*No such file"):
        Mpi().hosts({variable: str(tmp_path / "away")}, 1.0)


def test_without_an_mpirun_the_error_says_how_to_name_one(tmp_path):
    for environ in ({"PATH": str(tmp_path)}, {"PATH": str(tmp_path), OPEN_MPI[0]: "none"}):
        with pytest.raises(DiscoveryError, match=r"^'mpirun -np 3': .* PATH; .* --mpirun /path/to/mpirun"):
            Mpi("mpirun -np 3").hosts(environ, 1.0)


@given(st.binary(), st.binary(), st.lists(st.sampled_from(["a", "b-1.example"]), min_size=1))
def test_noise_around_what_ranks_say_is_not_heeded(before, after, names):
    said = f"[1,0]<stdout>:{MARK}{names}".replace("'", '"').encode()
    assert mpi.ranks(before + b"\n" + said + b"\n" + after) == names


def test_outside_of_mpirun_the_environment_is_left_alone():
    environ = {"OMPI_MCA_orte_keep_fqdn_hostnames": "1", "PRTE_MCA_prte_tmpdir_base": "/scratch"}
    assert mpi.outside(environ) == environ


def test_inside_of_mpirun_only_what_users_have_set_is_handed_on():
    ours = {
        "PATH": "/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OPAL_PREFIX": "/x",
    }
    theirs = [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_MCA_ess",
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_hnp_uri",
        "PMIX_RANK",
    ]
    assert mpi.outside({**ours, **dict.fromkeys([*theirs, "PRTE_LAUNCHED", "PMIX_SERVER_URI3"], "x")}) == ours


@given(st.text())
def test_whatever_a_list_holds_there_are_hosts_or_an_error_of_ours(text):
    for read in (mpi.host_a_slot, mpi.host_and_slots, mpi.host_slots_queue):
        try:
            assert all(host.slots for host in read(text, "LIST"))
        except HostListError as error:
            assert error.source == "LIST"
