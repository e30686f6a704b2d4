"""Samples that were assigned to ranks: by whom does not matter to what is learned.

Under every exchange that assigns them the same bits, and those of samples as they are given but for
rounding.
"""

from itertools import product

import assigned_cases as cases
import numpy as np
import pytest

from cases import records_of
from grids import WHOLE, some
from pibroch import Adam
from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, synthesize

EXCHANGES = {
    "retrieve": {"exchange": "retrieve"},
    "retrieve, copies": {"exchange": "retrieve", "placement": {"C1": "replicated", "": "row_wise"}},
    "table_wise": {"exchange": "alltoall", "placement": "table_wise"},
    "lookahead": {"exchange": "lookahead"},
    "one step ahead": {"exchange": "lookahead", "lookahead": 1, "delayed_sync": False},
    "partitioned": {"exchange": "lookahead", "lookahead": 7, "cache": "partitioned"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Bags and single ids, with batches beyond a restart of the assigner."""
    folder = tmp_path_factory.mktemp("data") / "small"
    options = SyntheticOptions(num_samples=3500, max_table_rows=30, multi_hot=True)
    synthesize(options, folder)
    return folder


def whole(results):
    """Each step's embeddings in the order of the global batch."""
    steps = []
    for parts in zip(*(steps for steps, *_ in results), strict=True):
        places = np.concatenate([places for places, _ in parts])
        assert sorted(places.tolist()) == list(range(len(places)))
        width = max(out.shape[1] for _, out in parts)
        outs = np.zeros((len(places), width), np.float32)
        for own, out in parts:
            outs[own, : out.shape[1]] = out
        steps.append(outs)
    return steps


def records(results, data):
    tables = cases.tables_of(EncodedDataset.open(data))
    return records_of(
        [piece for _, pieces, _ in results for piece in pieces], tables, Adam(lr=0.05)
    )


@pytest.mark.parametrize(
    ("size", "how"),
    product([1, 2, 3, 4], ["random", "rows"])
    if WHOLE
    else [(1, "rows"), (2, "random"), (3, "random"), (4, "rows")],
)
def test_an_assigned_run_is_that_of_its_assignment(worlds, data, size, how):
    epochs = 2 if size == 2 else 1  # the assigner begins anew within one, too

    def run(how, **options):
        return worlds(size).run(cases.train, data, how, epochs, **options)

    expected = run(how, exchange="alltoall")
    given = run("given", exchange="alltoall")
    for name, options in some(EXCHANGES.items(), size, 2) if how == "random" else ():
        results = run(how, **options)
        for rank, (steps, *_) in enumerate(results):
            for (places, out), (others, right) in zip(steps, expected[rank][0], strict=True):
                assert np.array_equal(places, others), name
                assert np.array_equal(out, right), name
        assert np.array_equal(records(results, data), records(expected, data)), name
    for ours, others in zip(whole(expected), whole(given), strict=True):
        np.testing.assert_allclose(ours, others, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(records(expected, data), records(given, data), rtol=5e-3, atol=5e-4)
    if how == "random" and size > 1:
        moved = [places for (steps, *_) in expected for places, _ in steps]
        assert any((np.diff(places) > 1).any() for places in moved)


@pytest.mark.parametrize("exchange", ["lookahead", "alltoall", "retrieve"])
def test_assigned_by_rows_less_crosses(worlds, data, exchange):
    results = worlds(2).run(cases.train, data, "rows", exchange=exchange)
    (expected, given), other = (transfers for *_, transfers in results)
    assert (expected, given) == other
    assert 0 < expected < given


@pytest.mark.parametrize("step", [0, 9, 62, 63, 64])
def test_who_goes_on_in_the_middle_has_the_same_samples(worlds, data, step):
    for places, again in worlds(2).run(cases.go_on, data, step):
        assert len(places) == len(again) > 0
        assert all(map(np.array_equal, places, again))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("word", "assign 'row'"),
        ("pooled", "where owners pool"),
        ("stream", "each rank reads for itself"),
        ("seed", "separate data"),
        ("part", "a loader of part"),
        ("move", "rows that are to move"),
    ],
)
def test_what_cannot_be_assigned_is_refused_with_the_reason(worlds, data, kind, text):
    messages = worlds(2).run(cases.refusal, data, kind)
    assert all(text in message for message in messages)
