"""Sixty-four workers on one machine.

All join, call each other, share an owner's references, and leave together.
"""

import time

import many_cases
import pytest
import reference_cases as cases
import rpc_team

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300), pytest.mark.slow]  # alone: 64 processes

NUM_WORKERS = 64
MEMORY_BYTES = 6 << 30
LIMIT_S = 180  # generous, for loaded machines


def test_sixty_four_workers():
    began = time.monotonic()
    team = rpc_team.Team(NUM_WORKERS)
    try:
        # all have imported the module before the first call comes
        team.run_all(many_cases.memory_bytes)
        answers = team.run_all(many_cases.call_a_neighbour_and_the_owner, NUM_WORKERS)
        assert answers == [(5 * rank + 1, [0, 1, 2]) for rank in range(NUM_WORKERS)]
        assert team.run_all(cases.settle) == [{}] * NUM_WORKERS
        assert sum(team.run_all(many_cases.memory_bytes)) < MEMORY_BYTES
        team.run_all(rpc_team.leave)
    finally:
        team.close()
    assert [worker.process.exitcode for worker in team.workers] == [0] * NUM_WORKERS
    assert time.monotonic() - began < LIMIT_S
