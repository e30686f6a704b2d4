import numpy as np
import pytest

from pibroch.planner import cost as costs
from pibroch.planner.topology import ClusterTopology


def paths(source, num_shards):
    """P_k of the paper: [P, W, W]."""
    return source[:, :, None] == np.arange(num_shards)


def random_case(seed, num_shards=4, num_partitions=30):
    rng = np.random.default_rng(seed)
    home = rng.integers(0, num_shards, num_partitions).astype(np.uint16)
    copies = rng.random((num_partitions, num_shards)) < 0.3
    copies[np.arange(num_partitions), home] = False
    return home, copies, rng.random(num_partitions) * 9, rng.random(num_partitions) * 5


@pytest.mark.parametrize(
    "topology", [ClusterTopology.uniform(4), ClusterTopology.hierarchical(2, 2, 4.21)]
)
def test_equations_as_the_paper_writes_them(topology):
    home, copies, size, accesses = random_case(1)
    source = costs.sources(home, copies, topology.cost)
    chosen = paths(source, 4)
    for j in range(4):
        assert costs.memory(size, costs.holders(home, copies))[j] == pytest.approx(
            sum(size[k] for k in range(30) if home[k] == j or copies[k, j])
        )
        eq2 = sum(size[k] * accesses[k] * chosen[k, i, j] for k in range(30) for i in range(4))
        assert costs.workload(size * accesses, source, topology.cost)[j] == pytest.approx(eq2)
        for i in range(4):
            eq3 = (
                sum(size[k] * accesses[k] * chosen[k, i, j] for k in range(30))
                * topology.cost[i, j]
            )
            assert costs.communication(size * accesses, source, topology.cost)[
                i, j
            ] == pytest.approx(eq3)


@pytest.mark.parametrize("seed", range(5))
def test_reads_are_local_where_they_can_be_and_cheapest_else(seed):
    topology = ClusterTopology.hierarchical(2, 3, 2.0)
    home, copies, *_ = random_case(seed, 6, 60)
    source = costs.sources(home, copies, topology.cost)
    held = costs.holders(home, copies)
    for partition in range(60):
        for reader in range(6):
            result = source[partition, reader]
            assert held[partition, result]
            if held[partition, reader]:
                assert result == reader
                continue
            prices = topology.cost[reader]
            least = prices[held[partition]].min()
            assert prices[result] == least
            if prices[home[partition]] == least:
                assert result == home[partition]


def test_workload_counts_own_memory_where_it_costs():
    cost = np.array([[0.5, 2.0], [2.0, 0.25]])
    source = costs.sources(np.array([0, 1]), np.zeros((2, 2), bool), cost)
    assert costs.workload(np.array([4.0, 8.0]), source, cost).tolist() == [4.0, 4.0]


def test_distinct_rows_of_a_batch():
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 200)
    share /= share.sum()
    drawn = [len(np.unique(rng.choice(len(share), 64, p=share))) for _ in range(300)]
    assert costs.distinct(share, 64).sum() == pytest.approx(np.mean(drawn), rel=0.02)


def test_balance():
    assert costs.degree_of_balance(np.zeros(3)) == 1.0
    assert costs.links(np.arange(9.0).reshape(3, 3)).tolist() == [1, 2, 3, 5, 6, 7]
