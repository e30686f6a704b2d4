import pytest

from pibroch.collectives import Topology


def test_hosts_are_numbered_by_their_first_ranks():
    topology = Topology.of(["b", "a", "b", "c", "a", "b"])
    assert topology.host_of_rank == (0, 1, 0, 2, 1, 0)
    assert topology.ranks_by_host == ((0, 2, 5), (1, 4), (3,))
    assert (topology.num_hosts, topology.ranks_per_host) == (3, None)
    assert [topology.local_rank(rank) for rank in range(6)] == [0, 0, 1, 0, 1, 2]
    assert [topology.local_size(rank) for rank in range(6)] == [3, 2, 3, 1, 2, 3]
    assert topology.peers() == ((0, 1, 3), (2, 4), (5,))


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(1, 1), (1, 4), (3, 1), (2, 4), (3, 2)])
def test_equal_hosts(num_hosts, ranks_per_host):
    size = num_hosts * ranks_per_host
    topology = Topology.of([f"host {rank // ranks_per_host}" for rank in range(size)])
    assert (topology.num_hosts, topology.ranks_per_host) == (num_hosts, ranks_per_host)
    # with L consecutive ranks a host these are DMT's (rank mod L, rank div L)
    key = lambda rank: (rank % ranks_per_host, rank // ranks_per_host)  # noqa: E731
    in_order = tuple(rank for peers in topology.peers() for rank in peers)
    assert in_order == tuple(sorted(range(size), key=key))


def test_an_empty_run_has_no_hosts():
    topology = Topology.of([])
    assert (topology.num_hosts, topology.ranks_per_host, topology.peers()) == (0, None, ())
