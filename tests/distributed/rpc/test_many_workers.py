"""Sixty-four workers on one machine.

All join, call each other, share an owner's references, and leave together.
"""

import time

import many_cases
import pytest
import reference_cases as cases
import rpc_crew

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300), pytest.mark.slow]  # alone: 64 processes

NUM_WORKERS = 64
MEMORY_BYTES = 6 << 30
LIMIT_S = 180  # generous, for loaded machines


def test_sixty_four_workers():
    began = time.monotonic()
    crew = rpc_crew.Crew(NUM_WORKERS)
    try:
        # all have imported the module before the first call comes
        crew.run_all(many_cases.memory_bytes)
        answers = crew.run_all(many_cases.call_a_neighbour_and_the_owner, NUM_WORKERS)
        assert answers == [(5 * rank + 1, [0, 1, 2]) for rank in range(NUM_WORKERS)]
        assert crew.run_all(cases.settle) == [{}] * NUM_WORKERS
        assert sum(crew.run_all(many_cases.memory_bytes)) < MEMORY_BYTES
        crew.run_all(rpc_crew.leave)
    finally:
        crew.close()
    assert [worker.process.exitcode for worker in crew.workers] == [0] * NUM_WORKERS
    assert time.monotonic() - began < LIMIT_S
