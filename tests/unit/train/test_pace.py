"""What is due every so many seconds, whatever the rhythm of steps."""

from itertools import pairwise

import pytest

from pibroch.collectives.world import World
from pibroch.train.pace import Pace


@pytest.mark.parametrize("burst", [1, 5, 50])
def test_bursts_of_steps_hold_nothing_up(monkeypatch, burst):
    """A step within a burst takes a hundredth of a second, and a burst comes each second."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = Pace(World.alone().control, 1.0)
    moments = []
    for step in range(1, 60 * burst):
        number, place = divmod(step, burst)
        now = 100.0 + number + 0.01 * place
        if pace.is_due(step):
            moments.append(now)
            pace.restart()
    between = [after - before for before, after in pairwise(moments)]
    assert max(between[2:]) <= 2.0 + 0.01 * burst
    assert pace.num_agreed < 60 * min(burst, 20)
