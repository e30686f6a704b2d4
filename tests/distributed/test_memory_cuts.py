"""Cuts in memory of several lives of a run, on two ranks."""

import memory_cuts_cases as cases


def test_only_the_first_rank_writes_the_state(worlds, data, tmp_path):
    """Also where the memory that was found is older than the checkpoint that a life began with."""
    ranks = worlds(2).run(cases.cut_after_a_newer_checkpoint, str(data), str(tmp_path))
    steps = [(step, step) for step in range(1, 2 * cases.LIVES, 2)]
    assert ranks == [steps, steps]
