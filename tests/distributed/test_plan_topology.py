import numpy as np

from pibroch.planner.topology import ClusterTopology
from pibroch.train.measured_topology import Measured
from small_run import run_command


def test_links_are_measured_on_running_ranks(tmp_path):
    out = tmp_path / "topology.json"
    ended = run_command("plan", "topology", "--ranks", 3, "--out", out)
    assert ended.returncode == 0, ended.stderr
    result = ClusterTopology.load(out)
    assert result.host_of_rank == (0, 0, 0)
    others = ~np.eye(3, dtype=bool)
    assert (
        result.cost[others].min() == 1.0
        and (np.diag(result.cost)[:, None] < result.cost)[others].all()
    )
    assert 1e6 < result.p2p_bandwidth < 1e12 and 1e6 < result.all_reduce_bandwidth < 1e12
    assert "rank 2 reads at" in ended.stdout
    there = run_command("plan", "topology", "--out", tmp_path / "no" / "topology.json")
    assert there.returncode != 0 and "while writing" in there.stderr


def test_costs_are_relative_to_the_quickest_link_and_own_memory_never_costs_more():
    read = np.array([[9e-9, 2e-9], [4e-9, 1e-10]])
    result = Measured((0, 1), read, 1e-9).content()
    assert result["cost"] == [[0.99, 1.0], [2.0, 0.05]]
    assert result["all_reduce_bandwidth"] == 1e9
    assert ClusterTopology.of(result, "").host_of_rank == (0, 1)
