"""Where a step's time goes, and losses side by side: what is made of what the workers tell."""

import numpy as np
import pytest
import torch
from benchmarks.breakdown import (
    DENSE,
    DENSE_WAIT,
    LOOKUP,
    REST,
    ROWS_WAIT,
    UPDATE,
    StackedPlot,
    beyond_ideal,
    breakdown_rows,
    parts_ms,
)
from benchmarks.contender import BenchmarkError, Timing
from benchmarks.loss_curves import CurvePlot, check_equal, curve_rows
from benchmarks.runner import Times
from benchmarks.workers.parts import Parts, own_times


def test_a_moment_counts_for_the_innermost_part():
    spans = [
        ("lookup", 2.0, 5.0),
        ("wait", 3.0, 4.5),
        ("forward", 1.0, 6.0),
        ("update", 6.0, 7.0),
        ("backward", 6.0, 9.0),
    ]
    assert own_times(reversed(spans)) == {
        "forward": 2.0,
        "forward/lookup": 1.5,
        "forward/lookup/wait": 1.5,
        "backward": 2.0,
        "backward/update": 1.0,
    }
    assert own_times([("a", 0.0, 1.0), ("a", 1.0, 3.0)]) == {"a": 3.0}
    assert own_times([]) == {}


def test_parts_of_a_backward_pass_are_found_by_its_nodes():
    parts = Parts(True)
    weight = torch.ones(3, requires_grad=True)
    with parts.part("forward"):
        looked_up = weight * 2
        parts.in_backward("update", looked_up)
        loss = looked_up.exp().sum()
    parts.after_backward("wait", loss)
    with parts.part("backward"):
        loss.backward()
    times = parts.take_ms()
    assert set(times) == {"forward", "backward", "backward/update", "backward/wait"}
    assert all(ms > 0 for ms in times.values())
    assert parts.take_ms() == {}


def test_parts_that_are_off_leave_nothing():
    parts = Parts(False)
    with parts.part("forward"):
        assert list(parts.each("read", [1, 2])) == [1, 2]
    assert parts.take_ms() == {}


def test_a_part_that_fails_ends():
    parts = Parts(True)
    with pytest.raises(ValueError, match="no"), parts.part("forward"):
        parts.begin("lookup")
        raise ValueError("no")
    assert set(parts.take_ms()) == {"forward", "forward/lookup"}


def reported_times():
    times = Times()
    times.add(
        Timing(
            [10.0, 12.0],
            1.0,
            {"loss": [0.7, 0.6], "forward": [4.0, 5.0], "forward/lookup/wait": [2.0, 2.0]},
        )
    )
    times.add(
        Timing(
            [20.0],
            1.0,
            {"loss": [0.5], "forward": [6.0], "backward/wait": [9.0], "backward/update": [1.0]},
        )
    )
    return times


def test_figures_of_rounds_stand_beside_their_steps():
    assert reported_times().figures == {
        "loss": [0.7, 0.6, 0.5],
        "forward": [4.0, 5.0, 6.0],
        "forward/lookup/wait": [2.0, 2.0, 0.0],
        "backward/wait": [0.0, 0.0, 9.0],
        "backward/update": [0.0, 0.0, 1.0],
    }


def test_parts_and_the_rest_are_the_step():
    result = parts_ms(reported_times())
    assert sum(result.values()).tolist() == [10.0, 12.0, 20.0]
    assert result[DENSE].tolist() == [4.0, 5.0, 6.0]
    assert result[ROWS_WAIT].tolist() == [2.0, 2.0, 0.0]
    assert result[DENSE_WAIT].tolist() == [0.0, 0.0, 9.0]
    assert result[UPDATE].tolist() == [0.0, 0.0, 1.0]
    assert result[REST].tolist() == [4.0, 5.0, 4.0]
    assert not result[LOOKUP].any()


def test_shares_of_a_step_sum_to_one_and_are_drawn(tmp_path):
    ideal = Times(
        [[7.0, 7.0, 7.0]], [1.0], {"forward": [5.0, 5.0, 5.0], "backward/wait": [1.0, 1.0, 1.0]}
    )
    rows = breakdown_rows({"panel": "dim 16", "contender": "lookahead"}, reported_times())
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert sum(row["height"] for row in rows) == pytest.approx(14.0)
    assert beyond_ideal(rows) == [], "there is no ideal to compare with"
    rows += breakdown_rows({"panel": "dim 16", "contender": "ideal"}, ideal)
    assert [row["part"] for row in rows[-3:]] == [DENSE, DENSE_WAIT, REST], (
        "parts that never happen have no row"
    )
    assert beyond_ideal(rows) == ["**dim 16: share of a step beyond the ideal's: 50% (lookahead)**"]
    StackedPlot().draw(rows, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_equal_losses_are_said_and_drawn(tmp_path):
    losses = np.linspace(0.7, 0.6, 20).tolist()
    curves = {"lookahead": (losses, [100.0] * 20), "alltoall": (losses[:], [200.0] * 20)}
    check_equal(curves)
    rows = curve_rows({label: {"contender": label} for label in curves}, curves)
    assert [(row["contender"], row["step"], row["equal_losses"]) for row in rows] == [
        ("lookahead", 10, "10 of 10"),
        ("lookahead", 20, "20 of 20"),
        ("alltoall", 10, "10 of 10"),
        ("alltoall", 20, "20 of 20"),
    ]
    assert [row["seconds"] for row in rows] == pytest.approx([1.0, 2.0, 2.0, 4.0])
    assert rows[1]["last_loss"] == losses[-1]
    assert rows[0]["loss"] == pytest.approx(np.mean(losses[:10]))
    CurvePlot().draw(rows, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_losses_that_differ_in_the_last_bit_are_refused():
    right = [0.5, 0.25]
    with pytest.raises(BenchmarkError, match=r"from alltoall .* in step 2"):
        check_equal(
            {"lookahead": (right, [1.0] * 2), "alltoall": ([0.5, np.nextafter(0.25, 1)], [1.0] * 2)}
        )
