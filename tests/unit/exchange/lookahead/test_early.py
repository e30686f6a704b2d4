"""Rows that may be asked of servers early.

At home, wanted by this rank in that step, and by nobody before.
"""

import numpy as np
import pytest

from pibroch.exchange.lookahead.oracle import Oracle, early_steps

NUM_TRAINERS = 2
BOUNDS = np.array([0, 0, 0, 40, 80])


@pytest.mark.parametrize(
    "lookahead, capacity, seed", [(12, 80, 1), (30, 80, 2), (12, 30, 3), (9, 24, 4), (3, 80, 5)]
)
def test_rows_are_at_home_and_stay_there_until_they_are_wanted(lookahead, capacity, seed):
    rng = np.random.default_rng(seed)
    num_steps = 60
    touches = [
        [np.unique(rng.integers(0, 80, rng.integers(0, 7)) ** 2 // 80) for _ in range(NUM_TRAINERS)]
        for _ in range(num_steps)
    ]
    oracles = [
        Oracle(BOUNDS, rank, lookahead, capacity, num_trainers=NUM_TRAINERS)
        for rank in range(NUM_TRAINERS)
    ]
    for step in touches:
        for oracle in oracles:
            oracle.add(step)
    num_early = 0
    moved = [set() for _ in oracles]
    promised = [[] for _ in oracles]  # (until which plan, rows)
    for each, oracle in enumerate(oracles):
        opening = oracle.open()
        moved[each] |= rows_moved(
            [opening.now] + ([] if opening.prefetch is None else [opening.prefetch])
        )
    for step in range(num_steps):
        for rank, oracle in enumerate(oracles):
            plan = oracle.plan()
            travels = rows_moved(
                [plan.next_step, *plan.evicted, *([] if plan.prefetch is None else [plan.prefetch])]
            )
            for reading_step, rows in promised[rank]:
                if step < reading_step - 2:  # its plan moves what the step after next reads
                    assert not travels & rows
            rows = set(plan.early.tolist())
            if rows:
                reading_step = step + early_steps(lookahead)
                assert rows <= set(touches[reading_step][rank].tolist())
                for between in range(step, reading_step):
                    assert not rows & set(np.concatenate(touches[between]).tolist())
                promised[rank].append((reading_step, rows))
                num_early += len(rows)
    assert (num_early > 20) == bool(early_steps(lookahead)), num_early


def rows_moved(transfers):
    return {
        int(row)
        for transfer in transfers
        for row in (*transfer.rows_in, *transfer.borrowed_rows_in)
    }


def test_without_servers_nothing_is_early():
    oracle = Oracle(np.array([0, 40, 80]), 0, 20, 80)
    for step in range(20):
        oracle.add([np.array([step]), np.array([40 + step])])
    oracle.open()
    assert not any(len(oracle.plan().early) for _ in range(20))
