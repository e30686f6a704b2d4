"""A program of one's own, killed and resumed by `pibroch.save` and `pibroch.load`.

On as many ranks and on others.
"""

import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import role_team
import save_cases as cases
from test_checkpoint_move import compare, whole

import pibroch as pb
from forked import Program
from pibroch.collectives import Ranks
from pibroch.ports import free_port
from small_run import files_below

LAST = 9


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a program of two processes of its own that killed themselves in step 7."""
    folder = tmp_path_factory.mktemp("killed")
    here = Path(cases.__file__)
    paths = os.pathsep.join(
        [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Program(here, folder, 7, env={**common, "PYTHONPATH": paths, "RANK": str(rank)})
            )
            for rank in range(2)
        ]
        ended = [each.end(200) for each in ranks]
    assert [each.returncode for each in ended] == [-signal.SIGKILL] * 2, ended[0].stderr
    return folder


def numbers_of(results):
    """All rows and dense weights from all ranks' pieces, then rates and step.

    These all ranks have in common.
    """
    pieces = [
        ([(piece, {field: array}) for (_, field, *_), (piece, array) in r[0].items()], r[1])
        for r in results
    ]
    assert all(result[2] == results[0][2] for result in results)
    return whole(pieces) | {"rates": np.array(results[0][2])}


def test_a_killed_program_goes_on_to_the_same_bits(worlds, killed):
    assert [path.name for path in sorted(killed.glob("step-*"))] == [
        "step-00000004",
        "step-00000006",
    ]
    expected = numbers_of(worlds(2).run(cases.undisturbed, LAST))
    results = worlds(2).run(cases.resume, killed, LAST)
    assert results[0][0] == (
        6,
        pb.data.LoaderPosition(0, 6),
        {"step": 6, "seen": (1, float("inf"))},
    )
    compare(numbers_of([result[2] for result in results]), expected, same_bits=True)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"placement": "table_wise"}),
        (2, {"placement": "column_wise"}),
        (2, {"exchange": "lookahead"}),
        (1, {"exchange": "local"}),
    ],
)
def test_any_number_of_ranks_and_any_exchange_loads_it(worlds, killed, ranks, options):
    saved = numbers_of([result[1] for result in worlds(2).run(cases.resume, killed, 6)])
    expected = numbers_of(worlds(2).run(cases.undisturbed_from, killed, LAST))
    results = worlds(ranks).run(cases.resume, killed, LAST, False, **options)
    compare(numbers_of([result[1] for result in results]), saved, same_bits=True)
    compare(numbers_of([result[2] for result in results]), expected, same_bits=False)


def test_a_lost_newest_one_falls_back_and_the_next_takes_its_place(worlds, tmp_path, caplog):
    assert worlds(2).run(cases.save_damage_and_load, tmp_path) == [(4, "damaged (no")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000004",
        "step-00000006.aside",
    ]
    channel = Ranks.alone().open_channel()
    with caplog.at_level(logging.INFO):
        got = cases.resume(channel, tmp_path, 4, exchange="local")
    assert got[0][0] == 4 and "another number of ranks" in caplog.text


def test_errors_on_one_rank_are_errors_on_all(worlds, tmp_path):
    for message in worlds(2).run(cases.save_badly, tmp_path):
        steps, function, infinite = message
        assert "all ranks at the same step" in steps
        assert "extra/f, a builtin_function" in function
        assert "NaN or infinite" in infinite
    assert files_below(tmp_path) == {}


def test_two_processes_write_the_same_bytes_again(worlds, tmp_path):
    for name in ("one", "two"):
        worlds(2).run(cases.save_once, tmp_path / name)
    assert files_below(tmp_path / "one") == files_below(tmp_path / "two")
    assert len(files_below(tmp_path / "one")) > 10


MIXED = {"user": "column_wise", "item": "replicated", "word": "table_wise", "": "row_wise"}


def test_through_torch_distributed_checkpoint(worlds, tmp_path):
    saved = numbers_of(worlds(2).run(cases.dcp_save, tmp_path, 4, placement=MIXED))
    expected = numbers_of(worlds(2).run(cases.undisturbed, LAST, dropout=False, placement=MIXED))
    elsewhere = [
        (2, {"placement": MIXED}),
        (3, {"placement": "table_wise"}),
        (1, {"exchange": "local"}),
    ]
    for ranks, options in elsewhere:
        results = worlds(ranks).run(cases.dcp_resume, tmp_path, LAST, **options)
        compare(numbers_of([result[0] for result in results]), saved, same_bits=True)
        compare(numbers_of([result[1] for result in results]), expected, same_bits=ranks == 2)


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_whole_tables_are_gathered_and_spread(worlds, on_all_ranks):
    results = worlds(2).run(cases.gather_whole, on_all_ranks, placement=MIXED)
    numbers = numbers_of([result[1] for result in results])
    state = results[0][0]
    tables = {
        name.removeprefix("embedding_bags.").replace(".", "/"): array
        for name, array in state.items()
    }
    assert tables.keys() == {name for name in numbers if "/" in name}
    for name, array in tables.items():
        np.testing.assert_array_equal(array, numbers[name])
    assert results[1][0].keys() == (state.keys() if on_all_ranks else set())

    for ranks, options in ((3, {"placement": "table_wise"}), (2, {"placement": MIXED})):
        got = numbers_of(worlds(ranks).run(cases.fill_whole, state, ranks == 2, **options))
        compare({name: got[name] for name in tables}, tables, same_bits=True)


def test_what_does_not_fit_is_an_error_on_all_ranks(worlds):
    state = worlds(1).run(cases.gather_whole, False)[0][0]
    for shape, unknown, missing in worlds(2).run(cases.fill_badly, state):
        assert "'embedding_bags.user.weight' of shape [39, 8]" in shape and "[40, 8]" in shape
        assert "got 'other' in the state" in unknown
        assert "no 'embedding_bags.item.weight'" in missing


def test_saving_and_loading_interrupt_what_reads_ahead(worlds, tmp_path):
    expected = numbers_of(worlds(2).run(cases.undisturbed, LAST, dropout=False))
    options = {"exchange": "lookahead", "lookahead": 4}
    numbers = numbers_of(worlds(2).run(cases.read_ahead, tmp_path, LAST, 5, **options))
    compare(numbers, expected, same_bits=True)
    results = worlds(2).run(cases.resume, tmp_path, LAST, False, exchange="lookahead")
    compare(numbers_of([result[2] for result in results]), expected, same_bits=True)

    results = worlds(2).run(
        cases.read_ahead, tmp_path, LAST, None, 7, **options
    )  # steps 8 and 9 follow on step 5
    again = worlds(2).run(cases.steps_after_load, tmp_path, [8, 9])
    compare(numbers_of(results), numbers_of(again), same_bits=True)


def test_rows_on_servers(worlds, server_team, killed, tmp_path):
    expected = numbers_of(worlds(2).run(cases.undisturbed_from, killed, LAST))
    results = worlds(2).run(
        role_team.run, server_team.rendezvous, 2, cases.resume_and_save, killed, LAST, tmp_path
    )
    compare(numbers_of([result[1] for result in results]), expected, same_bits=True)
    for name, array in results[0][0].items():  # whole tables
        np.testing.assert_array_equal(
            array, expected[name.removeprefix("embedding_bags.").replace(".", "/")]
        )
    loaded = cases.resume(Ranks.alone().open_channel(), tmp_path, LAST, exchange="local")
    compare(numbers_of([loaded[1]]), expected, same_bits=True)


def test_what_groups_of_ranks_hold(worlds, tmp_path):
    saved = worlds(2).run(cases.towers, tmp_path, "save")
    both = saved[0] | saved[1]
    alone = cases.towers(Ranks.alone().open_channel(), tmp_path, "load")
    assert alone.keys() == both.keys() and any("towers.1.weight/exp_avg" in name for name in both)
    for result in (alone, *worlds(2).run(cases.towers, tmp_path, "load")):
        for name, array in result.items():
            np.testing.assert_array_equal(array, both[name], name)
