"""The exchange by towers with modules between its halves, over processes that stand for hosts."""

import numpy as np
import pytest
import torch
import tower_cases as cases

HOSTS = {
    "2 x 2": (4, {"ranks_per_host": 2}),
    "4 x 1, two hosts a tower": (4, {"ranks_per_host": 1, "hosts_per_tower": 2}),
    "3 x 1": (3, {"ranks_per_host": 1}),
    "2 + 1": (3, {"ranks_per_host": 2}),
}


def rows_of(results):
    found = {}
    for *_, pieces in results:
        for name, rows, columns, weights in pieces:
            table = found.setdefault(name, np.full((30, cases.DIM), np.nan))
            table[np.arange(30)[rows.start : rows.stop : rows.step][:, None], list(columns)] = weights
    return found


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("name", ["tower_dlrm", "tower_dcn"])
def test_with_modules_it_trains_the_model_of_alltoall(worlds, hosts, name):
    size, options = HOSTS[hosts]
    right = worlds(size).run(cases.train, 100, name, exchange="alltoall", placement="table_wise")
    found = worlds(size).run(cases.train, 100, name, exchange="towers", placement="table_wise", **options)
    for (logits, losses, state, _), (other_logits, other_losses, other_state, _) in zip(found, right, strict=True):
        for mine, other in zip(logits[:3], other_logits[:3], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        torch.testing.assert_close(logits[3], other_logits[3], rtol=0, atol=1e-5)
        np.testing.assert_allclose(losses, other_losses, rtol=1e-5, atol=1e-5)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, other_state[key], rtol=1e-4, atol=1e-5)
    held = [{key for key in state if "towers.towers" in key} for _, _, state, _ in found]
    assert held[0] != held[-1] and set().union(*held) == {key for key in right[0][2] if "towers.towers" in key}
    rows, other_rows = rows_of(found), rows_of(right)
    for table, weights in rows.items():
        np.testing.assert_allclose(weights, other_rows[table], rtol=1e-4, atol=1e-5)


STRIDED = [list(cases.FEATURES[first::2]) for first in range(2)]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_what_crosses_hosts_is_what_towers_give(worlds, ranks_per_host):
    """2 b F (1 - 1/H) 4 D / CR bytes a rank and step, by the counters of traffic, without ids."""
    num_hosts, batch_size, dim = 4 // ranks_per_host, 128, 64
    groups = STRIDED if num_hosts == 2 else [["a", "b"], ["c"], ["d", "e"], ["f"]]
    for compression in (1, 2, 4):
        width = None if compression == 1 else dim // compression
        results = worlds(4).run(
            cases.traffic, batch_size, ranks_per_host, exchange="towers", ranks_per_host=ranks_per_host, groups=groups,
            width=width, combined=0, dim=dim, dense=False, placement="table_wise_pooled",
        )  # fmt: skip
        expected = 4 * 2 * batch_size * len(cases.FEATURES) * (1 - 1 / num_hosts) * 4 * dim / compression
        ids = sum(purposes["ids"] for _, purposes, _ in results)
        counted = sum(purposes["embeddings"] + purposes["gradients"] for _, purposes, _ in results)
        assert counted == expected
        assert sum(across for across, *_ in results) - ids == pytest.approx(expected, rel=0.03)
        assert ids < 0.07 * expected


def test_dense_bytes_fall_by_those_of_the_tower_modules(worlds):
    """Which belong to one rank each here; a reduction sends 2 (W - 1) / W of its bytes, a flag a tensor among them."""
    groups, sent = [["a", "b"], ["c"], ["d", "e"], ["f"]], {}
    for exchange, more in (("alltoall", {}), ("towers", {"ranks_per_host": 1})):
        for dense in (True, False):
            sent[exchange, dense] = worlds(4).run(
                cases.traffic, 8, exchange=exchange, groups=groups, dense=dense, placement="table_wise", **more
            )
    parameters = sent["alltoall", True][0][2]
    modules = [count for name, count in parameters.items() if "towers.towers" in name]
    for rank in range(4):
        dense = {name: sent[name, True][rank][0] - sent[name, False][rank][0] for name in ("alltoall", "towers")}
        assert dense["alltoall"] - dense["towers"] == 2 * 3 / 4 * 4 * (sum(modules) + len(modules))
