"""Whatever a program does, and in whichever order: ``lookahead`` gives the bits of ``alltoall``."""

import numpy as np
import programs
import pytest
import role_team as on_servers
import torch
from test_world import whole_records

import cases
from cases import SHAPES

PROGRAMS_PER_TEST = 6


def check_same(seed, actual, expected):
    """What all ranks saw.

    A program for which the cache was too small stops on all ranks at the same place.
    """
    shape, name, _ = programs.setting_of(seed)
    whole = {}
    for rank, (own, other) in enumerate(zip(actual, expected, strict=True)):
        is_cut = isinstance(own[-1], str) and own[-1] == programs.NO_ROOM
        assert len(own) - is_cut <= len(other)
        assert len(own) == len(actual[0])
        for place, (what, expected_one) in enumerate(
            zip(own[: len(own) - is_cut], other, strict=False)
        ):
            where = (
                f"program {seed}, rank {rank}, at {place}:"
                f" {[w for w in own[: place + 1] if isinstance(w, str)]}"
            )
            if isinstance(what, str):
                assert what == expected_one, where
            elif isinstance(what, torch.Tensor):
                assert torch.equal(what, expected_one), where
            elif place not in whole:
                whole[place] = [
                    whole_records(
                        [(None, seen[place]) for seen in each],
                        SHAPES[shape],
                        cases.optimizers(name, shape),
                    )
                    for each in (actual, expected)
                ]
                assert np.array_equal(*whole[place]), where


@pytest.mark.parametrize("first", range(0, 18, PROGRAMS_PER_TEST))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_lookahead_sees_what_alltoall_sees(worlds, size, first):
    for seed in range(first, first + PROGRAMS_PER_TEST):
        seed, options = seed + 1000 * size, programs.setting_of(seed + 1000 * size)[2]
        expected = worlds(size).run(programs.run_program, seed, wire=options["wire"])
        actual = worlds(size).run(programs.run_program, seed, exchange="lookahead", **options)
        check_same(seed, actual, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_servers_see_what_alltoall_sees(worlds, server_team, size):
    for seed in range(4000 + 1000 * size, 4000 + 1000 * size + PROGRAMS_PER_TEST):
        options = programs.setting_of(seed)[2]
        run = programs.run_program
        expected = worlds(size).run(run, seed, wire=options["wire"])
        actual = worlds(size).run(
            on_servers.run, server_team.rendezvous, 1 + seed % 3, run, seed, **options
        )
        check_same(seed, actual, expected)
