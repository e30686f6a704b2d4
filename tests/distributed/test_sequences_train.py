"""Models of sequences under all exchanges, and what predicts with them afterwards."""

import numpy as np
import pytest
import training_cases as cases

from pibroch.config import model_sequences
from pibroch.data import EncodedDataset, Loader
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.serve.export import export_checkpoint
from pibroch.serve.predictor import Predictor
from pibroch.state.checkpoint_folder import find_checkpoint
from small_run import make_config, train_here

SETTINGS = (
    "model.histories={history='C2'}",
    "model.max_length=4",
    "train.epochs=none",
    "train.steps=8",
    "train.evaluate_every=4",
)
RUN = ("losses", "evaluations")
NAMES = [spec.name for spec in model_sequences.SPECS]


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences") / "data"
    synthesize(SyntheticOptions(num_samples=3000, max_table_rows=40, history=6), folder)
    return folder


@pytest.mark.parametrize("model", NAMES)
def test_every_exchange_trains_models_of_sequences(worlds, sequences, tmp_path, model):
    outcomes = []
    for exchange in ("alltoall", "lookahead", "retrieve"):
        settings = *SETTINGS, f"model.name={model}", f"embedding.exchange={exchange}"
        config = make_config(sequences, *settings)
        results = worlds(2).run(cases.train, config.model_dump(), str(tmp_path / exchange))
        outcomes += [[result[name] for name in RUN] for result in results]
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("model", NAMES)
def test_two_ranks_train_models_of_sequences_as_one_does(worlds, sequences, tmp_path, model):
    config = make_config(sequences, *SETTINGS, f"model.name={model}", "model.batch_norm=false")
    run, _ = train_here(config, tmp_path / "one")
    results = worlds(2).run(cases.train, config.model_dump(), str(tmp_path / "two"))
    losses = [record["loss"] for record in run.metrics() if record["kind"] == "training"]
    assert results[0]["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("model", NAMES)
def test_checkpoints_and_exports_score_alike(sequences, tmp_path, model):
    config = make_config(sequences, *SETTINGS, f"model.name={model}")
    run, result = train_here(config, tmp_path / "run")
    dataset = EncodedDataset.open(sequences)
    batch = next(iter(Loader(dataset.split("test"), 200)))
    trained = Predictor.open(run.path)
    export_checkpoint(find_checkpoint(run.path), tmp_path / "export")
    exported = Predictor.open(tmp_path / "export")
    assert trained.features == exported.features == dataset.schema.keys_by_table
    scores = [predictor.scores(batch) for predictor in (trained, exported)]
    assert np.array_equal(*scores)
    assert result.summary.auc is not None


def test_models_that_pool_take_sequences_for_bags(sequences, tmp_path):
    run, _ = train_here(make_config(sequences, "train.steps=4"), tmp_path / "run")
    dataset = EncodedDataset.open(sequences)
    batch = next(iter(Loader(dataset.split("test"), 200)))
    predictor = Predictor.open(run.path)
    embedded = predictor.embed(batch)
    assert embedded.shape == (200, 27, 4)
    names = dict(zip(predictor.features, embedded.unbind(1), strict=True))
    ids = batch.select(("history",))
    one = batch.select(("C2",)).values
    same = [b for b in range(200) if ids.offsets[b + 1] - ids.offsets[b] == 1]
    both = [b for b in same if ids.values[ids.offsets[b]] == one[b]]
    assert both
    assert all(np.array_equal(names["history"][b], names["C2"][b]) for b in both)
