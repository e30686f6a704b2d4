import threading

import numpy as np
import polars as pl
import pytest

import pibroch as pb
from pibroch.data import EncodedDataset
from pibroch.errors import CheckpointError, DataError
from pibroch.score.checkpoint import evaluate_checkpoint
from raw_clicks import prepared, raw_rows


@pytest.fixture(scope="module")
def predictor(clicks):
    return pb.Predictor.open(clicks.run)


@pytest.fixture(scope="module")
def evaluated(clicks, tmp_path_factory):
    """The scores of the test split as evaluation writes them."""
    out = tmp_path_factory.mktemp("scores") / "scores.parquet"
    evaluate_checkpoint(clicks.run, EncodedDataset.open(clicks.data), "test", out)
    return pl.read_parquet(out)["score"].to_numpy()


def test_raw_rows_score_as_evaluation_does(clicks, predictor, evaluated):
    rows = clicks.rows[-len(evaluated) :]
    assert len(evaluated) == 450 and predictor.takes_raw
    assert predictor.columns == ("price", "age", "user", "city", "slot", "tags")
    assert np.abs(predictor.score_raw(rows).numpy() - evaluated).max() < 1e-6
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert np.abs(predictor.score_raw(columns).numpy() - evaluated).max() < 1e-6
    typed = [
        {**row, "tags": row["tags"].split("|") if row["tags"] else [], "age": int(row["age"])}
        for row in rows
    ]
    assert np.abs(predictor.score_raw(typed).numpy() - evaluated).max() < 1e-6


def test_from_several_threads(clicks, predictor, evaluated):
    rows = clicks.rows[-450:]
    results = {}
    start = threading.Barrier(4)

    def ask(number):
        start.wait(60)
        results[number] = np.concatenate(
            [predictor.score_raw(rows[i : i + 90]).numpy() for i in range(0, 450, 90)]
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.abs(results[number] - evaluated).max() < 1e-6 for number in range(4))


def test_dictionaries_come_from_the_data_set(clicks, predictor, tmp_path):
    moved = clicks.data.rename(tmp_path / "moved")
    try:
        alone = pb.Predictor.open(clicks.run)
        assert not alone.takes_raw
        with pytest.raises(CheckpointError, match="pibroch export"):
            alone.score_raw(clicks.rows[:2])
        given = pb.Predictor.open(clicks.run, data=moved)
        assert np.array_equal(
            given.score_raw(clicks.rows[:9]), predictor.score_raw(clicks.rows[:9])
        )
    finally:
        moved.rename(clicks.data)
    other = prepared(tmp_path / "other", raw_rows(300, seed=1))
    with pytest.raises(CheckpointError, match="on which it was trained"):
        pb.Predictor.open(clicks.run, data=other)
    with pytest.raises(DataError):
        pb.Predictor.open(clicks.run, data=tmp_path)


def test_no_dictionaries_where_the_schema_says_all(data, tmp_path):
    from small_run import make_config, train_here

    run, _ = train_here(make_config(data, "train.steps=2"), tmp_path / "run")
    predictor = pb.Predictor.open(run.path, data=None)
    assert predictor.takes_raw and predictor._model.vocabularies.codes == {}


BAD = [
    ({"price": "cheap"}, "finite number"),
    ({"price": ["1"]}, "a list as price"),
    ({"user": "\ud800"}, "no text"),
    ({"age": 10**5000}, "no text"),
]


@pytest.mark.parametrize(
    ("change", "message"), BAD, ids=[message for _, message in BAD[:3]] + ["long number"]
)
def test_bad_values(clicks, predictor, change, message):
    with pytest.raises(DataError, match=message):
        predictor.score_raw([clicks.rows[0], {**clicks.rows[1], **change}])


def test_bad_rows(clicks, predictor):
    row = dict(clicks.rows[0])
    del row["slot"]
    with pytest.raises(DataError, match="row 1 without `slot`"):
        predictor.score_raw([clicks.rows[0], row])
    with pytest.raises(DataError, match="a str as row 0"):
        predictor.score_raw(["price"])
