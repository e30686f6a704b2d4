"""Tables of raw ids under every exchange that takes them: the same ids live, to the same bits."""

import shutil

import numpy as np
import pytest
import raw_id_cases as cases
import role_team as on_servers
import torch

import pibroch as pb
from grids import some

KINDS = {
    "all admitted": pb.Hashed(),
    "admitted by the third": pb.Hashed(admit=pb.AfterCount(3)),
    "counted by a sketch": pb.Hashed(admit=pb.AfterCount(2, sketch=True)),
    "the least frequent leave": pb.Hashed(evict=pb.LeastFrequent(half_life=4)),
    "they expire": pb.Hashed(expire_after=2),
    "they expire by event time": pb.Hashed(expire_after_seconds=0.3),
    "unknown ones share a row": pb.Hashed(admit=pb.AfterCount(2), unknown_row=True),
}
WAYS = [
    ("alltoall", {}),
    ("alltoall", {"placement": "column_wise"}),
    ("alltoall", {"placement": "table_wise_pooled"}),
    ("alltoall", {"placement": "table_wise"}),
    ("retrieve", {"placement": {"a": "replicated", "": "row_wise"}}),
    ("lookahead", {"cache": "lrpp", "lookahead": 3}),
    ("lookahead", {"cache": "partitioned", "lookahead": 1}),
    ("lookahead", {"cache": "replicated", "lookahead": 7}),
    ("lookahead", {"cache": "lrpp", "lookahead": 200}),
]


def records(ranks):
    """All ranks' records by table and row, from what runs return."""
    found = {}
    for _, pieces, _ in ranks:
        for piece, weights, state in pieces:
            for place, row in enumerate(piece.rows):
                parts = [weights[place], *(each[place] for each in state.values())]
                found.setdefault((piece.table.name, int(row)), []).append((piece.columns, parts))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["admitted by the third", "they expire"])
def test_a_program_of_four_ranks_goes_on_with_others(worlds, tmp_path, kind, ranks):
    """To the same ids, and from what as many ranks saved to the same bits."""
    number = ranks + (kind == "they expire")
    kind = KINDS[kind]
    whole = worlds(4).run(cases.go_on, kind, "alltoall", None, 0, 20)
    worlds(4).run(cases.go_on, kind, "alltoall", tmp_path / "four", 0, 9)
    saved = worlds(4).run(cases.go_on, kind, "alltoall", tmp_path / "four", 9, 9)
    ways = (("alltoall", {}), ("lookahead", {"lookahead": 3}))
    for exchange, options in some(ways, number, 2):
        folder = tmp_path / exchange
        shutil.copytree(tmp_path / "four", folder)
        results = worlds(ranks).run(cases.go_on, kind, exchange, folder, 9, 20, **options)
        for given, states in results:
            np.testing.assert_equal(states, whole[0][1])
            assert given[0].equal(saved[0][0][0]), "what was loaded is what was saved"
        alone = tmp_path / f"{exchange}-alone"
        expected = worlds(ranks).run(cases.go_on, kind, exchange, None, 0, 20, **options)
        worlds(ranks).run(cases.go_on, kind, exchange, alone, 0, 9, **options)
        again = worlds(ranks).run(cases.go_on, kind, exchange, alone, 9, 20, **options)
        for (given, states), (right, right_states) in zip(again, expected, strict=True):
            np.testing.assert_equal(states, right_states)
            assert all(map(torch.equal, given[1:], right[10:]))


@pytest.mark.parametrize(("exchange", "options"), WAYS)
def test_ids_of_loaded_weights_are_given_rows_alike_on_all_ranks(worlds, exchange, options):
    """Between two steps, of which the feed has read the next ones."""
    kind = pb.Hashed(expire_after=3)
    ((given, states),) = worlds(1).run(cases.load_and_train, kind, "local")
    results = worlds(2).run(cases.load_and_train, kind, exchange, **options)
    for _, others in results:
        np.testing.assert_equal(others, states)
    assert len(given) == 7
    expected = worlds(2).run(cases.load_and_train, kind, "alltoall")
    for (values, _), (right, _) in zip(results, expected, strict=True):
        assert all(map(torch.equal, values, right))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "optimizer", ["sgd", "adagrad", "adam", "row_wise_adagrad", "row_wise_adam"]
)
def test_one_process_trains_what_fixed_tables_train_by_hand(worlds, kind, optimizer):
    right, right_records, num_lives = cases.train_by_hand(kind, optimizer)
    assert num_lives > 1.3 * sum(map(len, right_records.values())), "rows are taken away"
    for fed in (True, False):
        (run,) = worlds(1).run(cases.train, kind, optimizer, "local", fed=fed)
        given, _, entries = run
        assert all(map(torch.equal, given, right))
        assert {t: set(ids) for t, (_, ids) in entries.items()} == {
            t: set(each) for t, each in right_records.items()
        }
        found = records([run])
        for table, (rows, ids) in entries.items():
            for row, id_ in zip(rows, ids, strict=True):
                ((_, numbers),) = found[table, row]
                np.testing.assert_equal(numbers, right_records[table][id_])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exchanges_agree_to_the_bit_and_with_one_process(worlds, size, kind):
    (alone,) = worlds(1).run(cases.train, kind, exchange="local")
    right = worlds(size).run(cases.train, kind)
    for exchange, options in some(WAYS, size + [*KINDS.values()].index(kind), 4):
        runs = worlds(size).run(cases.train, kind, exchange=exchange, **options)
        for (given, _, entries), (given_right, *_) in zip(runs, right, strict=True):
            assert all(map(torch.equal, given, given_right)), (exchange, options)
            assert entries == alone[2]
        check_same_records(runs, right)
    whole = [torch.cat(parts) for parts in zip(*(given for given, *_ in right), strict=True)]
    for step, (here, there) in enumerate(zip(whole, alone[0], strict=True)):
        torch.testing.assert_close(here, there, msg=f"lookup {step}")


OPTIMIZERS = ["sgd", "row_wise_adagrad", "adam", "row_wise_adam"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_agree_with_any_optimizer(worlds, size, optimizer):
    kind = KINDS["unknown ones share a row"]
    right = worlds(size).run(cases.train, kind, optimizer)
    for exchange, options in some(WAYS[-4:], size + OPTIMIZERS.index(optimizer), 2):
        runs = worlds(size).run(cases.train, kind, optimizer, exchange=exchange, **options)
        for (given, _, entries), (given_right, _, entries_right) in zip(runs, right, strict=True):
            assert all(map(torch.equal, given, given_right)), (exchange, options)
            assert entries == entries_right
        check_same_records(runs, right)


def check_same_records(runs, right):
    ours = records(runs)
    theirs = records(right)
    assert ours.keys() == theirs.keys()
    for key, parts in theirs.items():
        for field in range(len(parts[0][1])):
            whole = [
                np.concatenate([numbers[field] for _, numbers in sorted(each, key=first_column)])
                for each in (parts, ours[key])
            ]
            if len(whole[0]) == len(whole[1]):  # a number a row is there once a block of columns
                np.testing.assert_equal(*whole)


def first_column(part):
    return part[0].start


ODD = {
    "two lookups before an update": {"also": True},
    "steps that are skipped": {"skips": True},
    "rows of 16 bits": {"dtype": "bfloat16"},
    "learned weights": {"learned": True},
    "all of it": {"also": True, "skips": True, "dtype": "bfloat16", "learned": True},
}


@pytest.mark.parametrize("how", ODD.values(), ids=ODD)
@pytest.mark.parametrize("size", [1, 3])
def test_odd_programs(worlds, size, how):
    kind = pb.Hashed()
    right = worlds(size).run(cases.train, kind, **how)
    ways = [("lookahead", {"lookahead": 3}), ("lookahead", {"cache": "replicated"})]
    for exchange, options in ways + [("local", {})] * (size == 1):
        runs = worlds(size).run(cases.train, kind, exchange=exchange, **how, **options)
        for (given, _, entries), (given_right, _, entries_right) in zip(runs, right, strict=True):
            for number, (here, there) in enumerate(zip(given, given_right, strict=True)):
                np.testing.assert_equal(
                    here.numpy(), there.numpy(), err_msg=str((exchange, number))
                )
            assert entries == entries_right
        check_same_records(runs, right)


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_and_without_feed_and_after_a_feed_that_was_left(worlds, size, exchange):
    kind = pb.Hashed()
    right = worlds(size).run(cases.train, kind)
    for how in ({"fed": False}, {"stop": 5}):
        runs = worlds(size).run(cases.train, kind, exchange=exchange, **how)
        for (given, _, entries), (given_right, _, entries_right) in zip(runs, right, strict=True):
            assert all(map(torch.equal, given, given_right)), how
            assert entries == entries_right
        check_same_records(runs, right)


@pytest.mark.parametrize("size", [1, 3])
def test_with_rows_on_servers(worlds, server_team, size):
    kind = pb.Hashed()
    for how in some(({}, {"fed": False}, {"stop": 5}, {"also": True}), size // 2, 2):
        right = worlds(size).run(cases.train, kind, **how)
        runs = worlds(size).run(
            on_servers.run,
            server_team.rendezvous,
            2,
            cases.train,
            kind,
            lookahead=3,
            **how,
        )
        for (given, *_), (given_right, *_) in zip(runs, right, strict=True):
            assert all(map(torch.equal, given, given_right)), how


def test_frozen_tables_learn_nothing_and_a_feature_of_raw_ids_reads_one_table():
    tables = cases.tables_of(pb.Hashed())
    optimizers = {"": pb.SGD(lr=0.1), "c": pb.Frozen()}
    embeddings = pb.Embeddings(tables, optimizers)
    out = embeddings(cases.batch_of(0, 8, tables))
    out.cat().sum().backward()
    used = {
        name: len(index.entries()[0])
        for name, index in embeddings.row_indices.items()
        if name != "b"
    }
    assert used["c"] == 0 < min(used["a"], used["d"])
    assert not out["c"].any() and out["x"].any()
    with pytest.raises(pb.errors.ConfigError, match="feature 'x', which reads the tables a, wide"):
        pb.Embeddings([*tables, pb.Table("wide", 9, 1, features=("x",))], pb.SGD(lr=0.1))


def test_more_ids_in_a_batch_than_rows_change_nothing_in_any_table():
    tables = [pb.Table("a", 9, 4, rows=pb.Hashed()), pb.Table("b", 2, 4, rows=pb.Hashed())]
    embeddings = pb.Embeddings(tables, pb.SGD(lr=0.1))

    def batch(ids):
        ids_FB = torch.tensor([ids, ids])
        return pb.JaggedBatch.from_one_hot(
            torch.zeros(len(ids), 0), ["a", "b"], ids_FB, torch.zeros(len(ids))
        )

    embeddings(batch([5, 7])).sum().backward()
    before = {name: index.entries()[1].tolist() for name, index in embeddings.row_indices.items()}
    with pytest.raises(pb.errors.DataError, match=r"got table 'b': 3 distinct ids .* in step 2"):
        embeddings(batch([1, 2, 3]))
    after = {name: index.entries()[1].tolist() for name, index in embeddings.row_indices.items()}
    assert before == after == {"a": [5, 7], "b": [5, 7]}
    embeddings(batch([1, 7])).sum().backward()


def test_towers_refuse_raw_ids(worlds):
    message, _ = worlds(2).run(cases.refused, exchange="towers", ranks_per_host=1)
    assert "got tables of raw ids under towers; need the exchange local" in message
