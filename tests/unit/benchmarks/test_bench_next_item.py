"""Topic ``next_item``: both sides get the same events, and bars say what figures say."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from benchmarks.environments import recbole_python
from benchmarks.next_item_case import DATASET, NextItemCase
from benchmarks.next_item_runs import (
    Trained,
    prepare_samples,
    train_pibroch,
    train_recbole,
    write_events,
)
from benchmarks.topics import next_item

from pibroch.errors import MissingDependencyError

SMALL = NextItemCase(dim=8, max_length=4, pairs=64, epochs=2)
EVENTS = {f"u{user}": [f"i{(user + step) % 30}" for step in range(11)] for user in range(40)}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_samples(EVENTS, SMALL, tmp_path_factory.mktemp("next") / "data")


def items_of(dataset, split):
    """History and next item of each sample, as numbers of items."""
    part = dataset.split(split)
    bags = part.bags["history"]
    histories = [
        bags.values[start:end].tolist()
        for start, end in zip(bags.offsets[:-1], bags.offsets[1:], strict=True)
    ]
    return list(zip(histories, part.ids_of("item").tolist(), strict=True))


def test_the_last_item_is_tested_and_the_one_before_it_validates(dataset):
    validation, test, train = (items_of(dataset, each) for each in ("validation", "test", "train"))
    assert len(validation) == len(test) == len(EVENTS)
    for (before, item), (history, last) in zip(validation, test, strict=True):
        assert len(before) == len(history) == 4
        assert history == [*before[1:], item] and last not in history
    num_train = sum(len(history) for history, _ in train)
    assert num_train == len(EVENTS) * (4 + 4 + 4 + 2)  # ends after 9, 7, 5 and 3 of the first nine


def test_each_pair_of_training_is_met_and_none_of_the_rest(dataset):
    pairs = set()
    for history, item in items_of(dataset, "train"):
        pairs |= set(pairwise([*history, item]))
    # in these events an item is always followed by the same one
    assert len(pairs) == 30


def test_recbole_reads_the_same_events(tmp_path):
    write_events(EVENTS, tmp_path)
    lines = (tmp_path / DATASET / f"{DATASET}.inter").read_text().splitlines()
    assert len(lines) == 1 + sum(map(len, EVENTS.values()))
    assert lines[1:4] == ["u0\ti0\t0", "u0\ti1\t1", "u0\ti2\t2"]


@pytest.mark.parametrize("model", next_item.MODELS)
def test_a_run_says_how_good_it_is_and_how_long_it_took(model, tmp_path):
    case = replace(SMALL, model=model)
    trained = train_pibroch(case, prepare_samples(EVENTS, case, tmp_path / "s"), tmp_path / "run")
    assert trained.epochs == 2 and min(trained.seconds) > 0
    assert 0 <= trained.ndcg <= trained.hr <= 1


@pytest.mark.parametrize("model", next_item.MODELS)
def test_recbole_trains(model, tmp_path):
    try:
        recbole_python()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    write_events(EVENTS, tmp_path)
    trained = train_recbole(replace(SMALL, model=model), tmp_path)
    assert trained.epochs == len(trained.seconds) == 2 and min(trained.seconds) > 0
    assert 0 <= trained.ndcg <= trained.hr <= 1


def test_the_epoch_that_reaches_a_figure():
    trained = Trained(0.1, 0.05, [1.0, 2.0, 3.0, 4.0], [0.02, 0.04, 0.03, 0.04])
    assert [trained.epochs_until(each) for each in (0.01, 0.03, 0.04, 0.05)] == [1, 2, 2, None]
    assert trained.until_best() == replace(trained, seconds=[1.0, 2.0], validation=[0.02, 0.04])


def test_rows_and_headlines_say_whether_bars_hold():
    theirs = [Trained(hr, 0.05, [40.0, 40.0], [0.06, 0.05]) for hr in (0.10, 0.12, 0.11)]
    good = [Trained(0.091, 0.05, [5.0, 5.0], [0.05, 0.06])] * 3
    bad = [Trained(0.089, 0.05, [20.0, 20.0], [0.05, 0.05])] * 3
    rows = next_item.rows_of(good, theirs, good)
    assert [row["contender"] for row in rows] == [
        "pibroch", "RecBole", next_item.OURS_UNTIL, next_item.RECBOLE_UNTIL,
    ]  # fmt: skip
    assert [row["of_recbole"] for row in rows] == [0.125, 1.0, 0.25, 1.0]
    assert rows[1]["hr_by_seed"] == rows[3]["hr_by_seed"] == "0.1000, 0.1200, 0.1100"
    assert rows[1]["epochs"] == 2 and rows[3]["epochs"] == 1
    assert len(next_item.rows_of(bad, theirs, bad[:1])) == 2
    lines = next_item.headlines(good, theirs, good)
    assert [line.count("holds") for line in lines] == [1] * 6
    lines = next_item.headlines(bad, theirs, [])
    assert [line.count("missed") for line in lines] == [1, 0, 1, 0]


def test_a_case_is_text():
    assert NextItemCase.from_json(SMALL.to_json()) == SMALL
    assert json.loads(SMALL.to_json())["pairs"] == 64
