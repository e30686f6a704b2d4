import json

import numpy as np
import pytest

from pibroch.errors import ConfigError
from pibroch.planner.topology import ClusterTopology

TOML = (
    "hosts = [2, 1]\nmemory_bytes = [8e9, 8e9, 4e9]\nbetween_hosts = 3.0\nown = 0.5\np2p_bandwidth"
    " = 2e9\n"
)


def test_from_toml_and_json(tmp_path):
    (tmp_path / "t.toml").write_text(TOML, encoding="utf-8-sig")
    content = {"host_of_rank": [0, 0, 1], "memory_bytes": [8e9, 8e9, 4e9]}
    content["cost"] = [[0.5, 1, 3], [1, 0.5, 3], [3, 3, 0.5]]
    (tmp_path / "t.json").write_text(json.dumps(content | {"p2p_bandwidth": 2e9}))
    one = ClusterTopology.load(tmp_path / "t.toml")
    other = ClusterTopology.load(tmp_path / "t.json")
    assert one.host_of_rank == other.host_of_rank == (0, 0, 1)
    assert one.cost.tolist() == other.cost.tolist() == content["cost"]
    assert one.memory_bytes.tolist() == [8e9, 8e9, 4e9] and one.p2p_bandwidth == 2e9
    assert one.crosses_hosts.tolist() == [
        [False, False, True],
        [False, False, True],
        [True, True, False],
    ]


def test_made_ones():
    flat = ClusterTopology.uniform(3, 5.0)
    deep = ClusterTopology.hierarchical(2, 2, 4.21)
    assert flat.memory_bytes.tolist() == [5.0] * 3 and flat.cost.sum() == 6
    assert deep.cost[0].tolist() == [0, 1, 4.21, 4.21] and np.isinf(deep.memory_bytes).all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("hosts = [2", "unreadable"),
        ("", "exactly one of `hosts`"),
        ("hosts = [2]\nhost_of_rank = [0, 0]", "exactly one of `hosts`"),
        ("hosts = [2, 0]", "at least one rank a host"),
        ("hosts = [2]\nranks = 3", "unknown key `ranks`"),
        ("hosts = [2]\nown = -1", "`own = -1`"),
        ("hosts = [3]\nmemory_bytes = [1, 2]", "each of 3 ranks, got 2"),
        ("hosts = [2]\nmemory_bytes = [1, 0]", "positive `memory_bytes`"),
        ("hosts = [2]\ncost = [[0, 1]]", "`cost` of 2 rows of 2"),
        ("hosts = [2]\ncost = [[0, 1], [1]]", "`cost` of 2 rows of 2"),
        ("hosts = [2]\ncost = [[0, 0], [1, 0]]", "costs above 0 between ranks"),
        ("hosts = [2]\ncost = [[3, 1], [1, 0]]", "none below that of the reader's own memory"),
        ("hosts = [2]\ncost = [[0, 1], [1, nan]]", "finite costs"),
        ("hosts = [2]\nown = 0\ncost = [[0, 1], [1, 0]]", "not both"),
        ("hosts = [2000]", "1 to 1024 ranks"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        ClusterTopology.load(tmp_path / "t.toml")
    assert message in str(error.value) and "t.toml" in str(error.value)
    assert error.value.need and error.value.do


def test_a_rank_too_few():
    with pytest.raises(ConfigError, match="2 ranks for 3 shards"):
        ClusterTopology.uniform(2).check(3)
