"""Open MPI's hostfile, and the output of mpirun; mpirun itself is in tests/integration."""

import pytest

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.mpi import mpi
from hvdrecover.errors import DiscoveryError, HostListError

OPEN_MPI = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")


@pytest.mark.parametrize("variable", OPEN_MPI)
def test_the_hostfile_is_read(tmp_path, variable):
    path = tmp_path / "hostfile"
    path.write_text("# of the launcher\njob-worker-0.job slots=2\njob-worker-1.job slots=1 max_slots=4\nc\n")
    expected = [Host("job-worker-0.job", 2), Host("job-worker-1.job", 1), Host("c", None)]
    assert mpi({variable: str(path)}, 1.0) == expected
    path.write_text("a slots=0\n")
    with pytest.raises(HostListError, match="line 1: "):
        mpi({variable: str(path)}, 1.0)
    path.write_text("\n")
    with pytest.raises(DiscoveryError, match=f"^{variable}: names no host: {path} "):
        mpi({variable: str(path)}, 1.0)
    path.unlink()
    with pytest.raises(DiscoveryError, match=f"^{variable}: {path} .*No such file"):
        mpi({variable: str(path)}, 1.0)


def test_without_an_mpirun_the_error_says_how_to_name_one(tmp_path):
    for environ in ({"PATH": str(tmp_path)}, {"PATH": str(tmp_path), OPEN_MPI[0]: "none"}):
        with pytest.raises(DiscoveryError, match=r"^'mpirun -np 3': .* PATH; .* --mpirun /path/to/mpirun"):
            mpi(environ, 1.0, mpirun="mpirun -np 3")
