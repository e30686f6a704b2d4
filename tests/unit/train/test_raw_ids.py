"""Raw ids from data to scores: trained on by a recipe, resumed, evaluated, predicted and served."""

import numpy as np
import polars as pl
import pytest

from pibroch.data import EncodedDataset, Loader
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import ConfigError
from pibroch.score.checkpoint import open_for
from pibroch.score.split import score_split
from pibroch.serve.predictor import Predictor
from served import serving
from small_run import make_config, train_here

ROOMY = "embedding.rows={name='hashed', capacity=500}"
SCARCE = "embedding.rows={name='hashed', capacity=200, admit_after=2, evict='least_frequent'}"
SHORT = ("train.epochs=none", "train.steps=8", "train.checkpoint_every=4")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Generated data of raw ids; some features hold several."""
    folder = tmp_path_factory.mktemp("raw") / "small"
    synthesize(SyntheticOptions(3000, max_table_rows=400, multi_hot=True, raw=True), folder)
    return folder


def last(run, data):
    """Logits of some samples after the last step, and how many ids had lost their row."""
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 100)))
    (checkpoint,) = run.checkpoints_path.glob("step-*8")
    predictor = Predictor.open(checkpoint)
    indices = predictor._model.lookup.row_indices.values()
    return predictor.logits(batch), sum(index.counters()["evictions"] for index in indices)


@pytest.mark.parametrize("rows", [ROOMY, SCARCE], ids=["roomy", "scarce"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(raw, tmp_path, rows):
    run, _ = train_here(make_config(raw, rows, *SHORT), tmp_path / "run")
    train_here(make_config(raw, rows, *SHORT, "train.steps=4"), tmp_path / "again")
    again, _ = train_here(make_config(raw, rows, *SHORT), tmp_path / "again")
    (logits, num_evicted), (others, num_again) = (last(each, raw) for each in (run, again))
    assert logits.equal(others) and num_evicted == num_again
    assert (num_evicted > 0) == (rows == SCARCE)


def test_ids_with_a_row_each_are_learned_as_rows_are(raw, tmp_path):
    """To the bit, where all begin with the same weights."""
    synthesize(SyntheticOptions(3000, max_table_rows=400, multi_hot=True), tmp_path / "rows")
    zeros = "embedding.init.name=zeros"
    rows, _ = train_here(make_config(tmp_path / "rows", zeros, *SHORT), tmp_path / "a")
    run, _ = train_here(make_config(raw, zeros, ROOMY, *SHORT), tmp_path / "b")
    (checkpoint,) = rows.checkpoints_path.glob("step-*8")
    batch = next(iter(Loader(EncodedDataset.open(tmp_path / "rows").split("test"), 100)))
    assert last(run, raw)[0].equal(Predictor.open(checkpoint).logits(batch))


def test_no_rows_of_a_capacity_are_refused_before_training(raw, tmp_path):
    with pytest.raises(ConfigError, match="column 'C1', whose ids are raw; need an index with"):
        train_here(make_config(raw, *SHORT), tmp_path / "run")


SCHEMA = Schema.from_toml(
    'label = "y"\n[dense.price]\n[categorical.user]\nencoding = "raw"\n[categorical.tags]\n'
    'encoding = "raw"\nmulti_hot = true\n[categorical.city]\n'
)


def test_values_have_the_same_scores_however_they_come(tmp_path):
    """From encoded data by ``predict``, from Python and from JSON; unknown ones are absent."""
    rng = np.random.default_rng(0)
    records = [
        [row % 2, rng.integers(9), f"u{rng.integers(40)}", f"a|{rng.integers(5)}", f"c{row % 3}"]
        for row in range(600)
    ]
    lines = [
        ",".join(map(str, record)) for record in [["y", *SCHEMA.used_columns(False)], *records]
    ]
    (tmp_path / "clicks.csv").write_text("\n".join(lines))
    source = TextSource(tmp_path / "clicks.csv", ",", True, None)
    prepare([source], SCHEMA, tmp_path / "set", PrepareOptions())
    dataset = EncodedDataset.open(tmp_path / "set")
    rows = "embedding.rows={name='hashed', capacity=45, admit_after=2}"
    run, _ = train_here(make_config(dataset.path, rows, *SHORT), tmp_path / "run")
    score_split(*open_for(run.path, dataset), dataset, "test", tmp_path / "scores.parquet")
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"].to_numpy()
    names = SCHEMA.used_columns(False)
    asked = [
        {
            name: int(value) if name == "price" else value
            for name, value in zip(names, r[1:], strict=True)
        }
        for r in records[-90:]
    ]
    columns = {name: [row[name] for row in asked] for name in asked[0]}
    predictor = Predictor.open(run.path)
    assert np.allclose(predictor.score_raw(columns).numpy(), scores, atol=1e-6)
    assert len(np.unique(scores.round(6))) > 20
    first = {name: values[:1] for name, values in columns.items()}
    never = [predictor.score_raw(first | {"user": [user]}) for user in ("x", 7)]
    assert never[0].equal(never[1]), "neither has a row"
    with serving(run.path) as server:
        answer = server.ask("POST", "/score", {"rows": asked})
        assert np.allclose(answer.json["scores"], scores, atol=1e-6)
