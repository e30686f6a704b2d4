"""What topic ``cells`` compares: the sweep it says, and contenders that do the same work."""

from dataclasses import replace

import pytest
from benchmarks.comparison import OURS, Lineup, arena
from benchmarks.load import ForeignLoad
from benchmarks.runner import Schedule
from benchmarks.topics import cells as topic

SHORT = Schedule(rounds=2, steps_per_round=10, warmup_steps=1)


def test_the_sweep_spans_what_it_says():
    inference = topic.inference_cells()
    training = topic.training_cells()
    for cells in (inference, training):
        assert len({(cell.axis, cell.name) for cell in cells}) == len(cells)
        assert {cell.tables for cell in cells} >= {1, 8, 300, 1000}
        assert {cell.dim for cell in cells} >= {1, 8, 1024}
        assert {cell.pooling for cell in cells} == {"sum", "mean", "weighted"}
        assert max(cell.batch for cell in cells) >= 32_768
        assert max(cell.bag for cell in cells) >= 1000
    assert {cell.bag for cell in inference} >= {1, 5, 10, 100, 1000, 10_000}
    optimizers = {"sgd", "adagrad", "rowwise_adagrad", "adam"}
    assert {cell.optimizer for cell in training} == optimizers
    for updates, cells in ((False, inference), (True, training)):
        assert all(len(topic.absent_from(cell, updates)) < 2 for cell in cells)


@pytest.mark.parametrize("builder", ["build_lookup", "build"])
def test_contenders_agree_and_become_rows(small_case, builder):
    """FBGEMM is compared with them whenever the topic measures."""
    phase = "lookup" if builder == "build_lookup" else "lookup+update"
    workers = {OURS: f"cell_pibroch:{builder}", topic.TORCH: f"cell_torch:{builder}"}
    with arena(Lineup.of(workers, {}).specs, ForeignLoad()) as contenders:
        for pooling, optimizer in [("sum", "adagrad"), ("mean", "sgd"), ("weighted", "adam")]:
            case = replace(
                small_case,
                batch_size=8,
                ids_per_bag=4,
                pooling=pooling,
                sparse_optimizer=optimizer,
                eps=topic.ADAM_EPS,
            )
            outcome = contenders.compare(case, (phase,), SHORT, frozenset())
            assert ("row_movement" in outcome.agreement.largest) == (builder == "build")
            cell = topic.Cell("samples", "8", tables=3, dim=4, batch=8, bag=4, pooling=pooling)
            (row,) = topic.case_rows(cell, outcome, phase)
            assert row["of_peer"] == row["of_best"] == row["pibroch_us"] / row["peer_us"]
            assert set(topic.COLUMNS) <= set(row)
            assert "1 cells" in topic.headlines([row])[0]


def test_headlines_name_what_misses_the_goal():
    rows = [
        {"axis": "dim", "cell": "8", "of_best": 0.5},
        {"axis": "dim", "cell": "16", "of_best": 1.25},
    ]
    first, second = topic.headlines(rows)
    assert "1 of 2 cells" in first
    assert "dim: 16 1.25" in second
    assert "dim: 8" not in second
