import pytest

from pibroch.collectives import Topology


def test_hosts_are_numbered_by_their_first_ranks():
    topology = Topology.of(["b", "a", "b", "c", "a", "b"])
    assert topology.host_of_rank == (0, 1, 0, 2, 1, 0)
    assert topology.ranks_by_host == ((0, 2, 5), (1, 4), (3,))
    assert topology.num_hosts == 3


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(1, 1), (1, 4), (3, 1), (2, 4), (3, 2)])
def test_equal_hosts(num_hosts, ranks_per_host):
    size = num_hosts * ranks_per_host
    topology = Topology.of([f"host {rank // ranks_per_host}" for rank in range(size)])
    assert topology.num_hosts == num_hosts
    assert topology.host_of_rank == tuple(rank // ranks_per_host for rank in range(size))
    assert [len(ranks) for ranks in topology.ranks_by_host] == [ranks_per_host] * num_hosts


def test_an_empty_run_has_no_hosts():
    topology = Topology.of([])
    assert (topology.num_hosts, topology.ranks_by_host) == (0, ())
