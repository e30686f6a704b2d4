"""Topic ``models``: both sides are told the same, read the same and are one model."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from benchmarks.contender import BenchmarkError
from benchmarks.environments import fuxictr_python
from benchmarks.fuxictr_data import write_dataset, write_weights
from benchmarks.model_cases import LAYER, SCORES, TABLE, ModelCase
from benchmarks.model_runs import Trained, recipe, train_fuxictr, train_pibroch
from benchmarks.registry import Options
from benchmarks.topics import models

from pibroch.config.recipes import check_config
from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.errors import MissingDependencyError

SMALL = ModelCase("din", epochs=1, batch_size=512, dim=4, top=(8, 8), initial_std=0.5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("histories") / "data"
    synthesize(SyntheticOptions(num_samples=3000, max_table_rows=40, history=6), folder)
    opened = EncodedDataset.open(folder)
    write_dataset(opened, models.peer_files(opened))
    return opened


@pytest.mark.parametrize("section", models.MODELS)
def test_both_sides_are_told_the_same(section, dataset, tmp_path):
    whole, quick = (
        models.cases(Options(is_quick, tmp_path, print, section)) for is_quick in (False, True)
    )
    assert [case.optimizer for case in whole] == list(models.OPTIMIZERS)
    assert quick == [replace(whole[0], epochs=2, batch_size=512)]
    for case in whole:
        assert ModelCase.from_json(case.to_json()) == case
        config = check_config(recipe(case, dataset), "the test")
        same = ("dim", "top")
        assert asdict(case).items() >= config.model.model_dump(include=set(same)).items()
        assert config.train.batch_size == case.batch_size
        assert (config.train.epochs, config.train.early_stop_patience) == (case.epochs, 2)
        for optimizer in (config.optimizer, config.embedding.optimizer):
            assert (optimizer.name, optimizer.lr) == (case.optimizer, case.lr)
            assert optimizer.weight_decay == 0
        assert config.embedding.init.std == case.initial_std


def test_fuxictr_reads_the_same_samples(dataset):
    folder = models.peer_files(dataset)
    described = json.loads((folder / "feature_map.json").read_text())
    specs = {name: spec for feature in described["features"] for name, spec in feature.items()}
    assert list(specs) == [*dataset.schema.dense_names, *dataset.schema.keys]
    assert specs["C1"]["vocab_size"] == dataset.num_rows["C1"]
    assert specs["C2"]["vocab_size"] == specs["history"]["vocab_size"]
    assert specs["C2"]["vocab_size"] == dataset.num_rows["C2"] + 1
    assert specs["history"]["share_embedding"] == "C2"
    for name, file in (("train", "train"), ("validation", "valid"), ("test", "test")):
        split = dataset.split(name)
        bags = split.bags["history"]
        with np.load(folder / f"{file}.npz") as columns:
            assert set(columns) == {*specs, "label"}
            assert np.array_equal(columns["label"], split.labels)
            assert np.array_equal(columns["I2"], split.dense[:, 1])
            assert np.array_equal(columns["C1"], split.ids_of("C1"))
            assert np.array_equal(columns["C2"], split.ids_of("C2") + 1)
            histories = columns["history"]
            assert histories.shape == (len(split), 6)
            assert np.array_equal(histories[histories > 0], bags.values + 1)
            assert np.array_equal((histories > 0).sum(1), np.diff(bags.offsets))


def test_rows_say_whether_both_bars_hold():
    ours = [Trained(auc, 3, rate) for auc, rate in ((0.76, 41.0), (0.75, 90.0), (0.77, 30.0))]
    theirs = [Trained(auc, 2, 10.0) for auc in (0.7585, 0.7500, 0.7800)]
    pair = models.Pair(ModelCase("dcnv2"), ours, theirs, layers=[50.0, 30.0, 60.0])
    row, other, layers = models.rows_of(pair)
    assert (row["auc"], row["auc_by_seed"]) == (0.76, "0.7600, 0.7500, 0.7700")
    assert row["auc_difference"] == pytest.approx(0.0015) and row["auc_bar"] == "holds"
    assert row["over_fuxictr"] == pytest.approx(4.1) and row["speed_bar"] == "holds"
    assert "auc_bar" not in other and other["epochs"] == 2
    better = replace(pair, theirs=[replace(each, auc=each.auc - 0.002) for each in theirs])
    assert models.rows_of(better)[0]["auc_bar"] == "missed"  # better is not the same either
    quicker = replace(pair, theirs=[replace(each, samples_per_second=11.0) for each in theirs])
    assert models.rows_of(quicker)[0]["speed_bar"] == "missed"
    assert layers["over_fuxictr"] == pytest.approx(5.0) and "auc" not in layers
    alone, layers = models.rows_of(replace(pair, theirs=[]))
    assert alone["contender"] == "pibroch"
    assert "over_fuxictr" not in alone and "over_fuxictr" not in layers


def test_without_fuxictr_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PIBROCH_FUXICTR_PYTHON", str(tmp_path / "python"))
    with pytest.raises(MissingDependencyError, match=r"install\.sh --fuxictr"):
        fuxictr_python()


@pytest.mark.slow
def test_fuxictr_has_pibrochs_scores_with_its_weights(dataset, tmp_path):
    ours = train_pibroch(SMALL, dataset, tmp_path / "run")
    assert ours.epochs == 1 and ours.samples_per_second > 0
    weights = tmp_path / "weights.npz"
    write_weights(tmp_path / "run", dataset, weights)
    with np.load(weights) as arrays:
        assert len(arrays[SCORES]) == dataset.samples["test"]
        for name in dataset.schema.keys:
            assert arrays[TABLE + name].shape == (dataset.num_rows.get(name, 42), 4)
        assert sum(name.startswith(LAYER) for name in arrays) == 10  # attention 4, deep network 6
        wrong = dict(arrays)
    try:
        fuxictr_python()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    theirs = train_fuxictr(SMALL, models.peer_files(dataset), weights)
    assert theirs.score_gap < 1e-6 and theirs.epochs == 1 and 0 < theirs.auc < 1
    wrong[f"{LAYER}1"] += 0.1
    np.savez(weights, allow_pickle=False, **wrong)
    with pytest.raises(BenchmarkError, match="scores that differ"):
        train_fuxictr(SMALL, models.peer_files(dataset), weights)
