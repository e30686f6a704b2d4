"""Figures of papers: what can be worked out by hand."""

import numpy as np
import pytest
import torch
from benchmarks.papers import bagpipe, bls, dmt
from benchmarks.papers.points import Point

import pibroch as pb
from pibroch.embedding import group_tables
from pibroch.models.flops import training_flops
from pibroch.planner import Plan
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.sim.counting import Job
from pibroch.sim.sampled import lanes_of


def test_a_difference_is_that_of_the_ratio():
    assert Point("P", "f", "s", "w", 2.0, 1.5).row()["difference"] == pytest.approx(-0.25)
    assert Point("P", "f", "s", "w", None, 1.5).row()["difference"] is None


def test_delays_are_those_of_the_slowest_or_of_the_mean():
    step_ms = {each.what: each.predicted for each in bls.points()}
    assert step_ms["ms a step, bound 0"] == pytest.approx(5 + 10 * 8 / 9, rel=0.01)
    assert 10 < step_ms["ms a step, bound 16"] < 10.2


def test_models_are_the_papers():
    assert training_flops(dmt.dlrm()) / 1e6 == pytest.approx(14.74, rel=0.001)
    assert training_flops(dmt.dlrm(8)) / 1e6 == pytest.approx(8.95, rel=0.001)
    assert training_flops(dmt.dcn(8)) / 1e6 == pytest.approx(62.60, rel=0.001)


def test_towers_halve_what_crosses(monkeypatch):
    monkeypatch.setattr(dmt, "SAMPLES", 64)
    hosts = dmt.Hosts(2, 16)
    base = hosts.one_alltoall(dmt.dlrm()).on("A100", 2)
    ours = hosts.by_towers(dmt.dlrm(2)).on("A100", 2)
    ring = 4 * 2 * 15 / 16
    dense = [ring * sum(p.numel() for p in dmt.dlrm(n).parameters()) for n in (None, 2)]
    # of ids' embeddings and gradients half the ranks are on the other host
    rows = 2 * 8 * 64 * 26 * 128 * 2 / 2
    ids = 8 * 64 * 26 * 4 / 2
    assert base.link_bytes.max() == pytest.approx(rows + ids + dense[0], rel=0.05)
    assert ours.link_bytes.max() == pytest.approx(rows / 2 + ids + dense[1], rel=0.08)


def test_rates_of_a_log_are_at_the_rows_addresses():
    rng = np.random.default_rng(0)
    counts = {name: rng.integers(0, 9, rows) for name, rows in (("x", 50), ("y", 30))}
    counts = {name: own * (1000 / own.sum()) for name, own in counts.items()}
    tables = {
        name: TableCounts(own.astype(np.int64), np.ones(len(own), np.int32))
        for name, own in counts.items()
    }
    log = bagpipe.Log(AccessProfile(tables, 1000, 1, 1000, "log"))
    plan = Plan.of(log.tables, 3, "row_wise")
    ahead = pb.Lookahead(lookahead=2)
    job = Job(group_tables(log.tables, pb.Adagrad(lr=0.1)), plan, log.batch_of, ahead)
    lanes = lanes_of(job)
    (reads,) = log.rates(job, lanes)
    shares = -np.expm1(-reads.rates / bagpipe.SAMPLES)
    assert shares.sum() * 1000 == pytest.approx(sum(own.accesses.sum() for own in tables.values()))
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(1, 1), log.names, torch.tensor([[7], [11]]), torch.zeros(1)
    )
    addresses = lanes[0].resolve(batch)[0].row_ids
    found = dict(zip(reads.addresses.tolist(), (shares * 1000).round().tolist(), strict=True))
    assert [found.get(each, 0) for each in addresses.tolist()] == [
        tables["x"].accesses[7],
        tables["y"].accesses[11],
    ]
    assert log.distinct(1) == pytest.approx(shares.sum())
