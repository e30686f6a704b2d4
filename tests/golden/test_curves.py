"""Seeded curves of each model.

What a change to kernels, models, data or the loop does to training shows here.

After a change that is meant to move them: ``python tests/golden/test_curves.py``, and say in the
commit why they moved.
"""

import json
import tempfile
from pathlib import Path

import pytest

from pibroch.config import load_recipe

CURVES = Path(__file__).with_name("curves.json")
MODELS = ("dlrm", "dcnv2", "deepfm", "wide_deep")
ROUNDING = 2e-3  # processors differ in the order of sums within a dense layer


def measure(data, folder, name):
    from small_run import make_config, train_here

    settings = [
        f"model.name={name}",
        "train.average=0.95",
        "train.log_every=10",
        "schedule.warmup_steps=5",
    ]
    settings += ["model.batch_norm=false"]  # with Adam it makes rounding grow beyond the tolerance
    run, result = train_here(make_config(data, *settings, "train.evaluate_every=20"), folder)
    records = run.metrics()
    return {
        "loss": [round(r["loss"], 6) for r in records if r["kind"] == "training"],
        "validation_logloss": [
            round(r["logloss"], 6) for r in records if r.get("split") == "validation"
        ],
        "test_auc": round(result.summary.auc, 6),
        "best_possible_auc": round(result.best_possible_auc, 6),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("golden") / "data")


@pytest.mark.parametrize("name", MODELS)
def test_curve(data, tmp_path, name):
    measured = measure(data, tmp_path / "run", name)
    golden = json.loads(CURVES.read_text())[name]
    assert measured.keys() == golden.keys()
    for key, value in golden.items():
        assert measured[key] == pytest.approx(value, rel=ROUNDING), key


def test_the_planted_truth_is_learned(tmp_path, monkeypatch):
    """The shipped recipe on a fifth of its data comes within 0.03 of the best possible AUC."""
    from small_run import train_here

    monkeypatch.setenv("PIBROCH_CACHE", str(tmp_path / "cache"))
    overrides = [
        "data.synthesize={rows=200_000, max_table_rows=1000}",
        "train.average=0.99",
        "train.threads=1",
    ]
    _, result = train_here(load_recipe("synthetic_small", overrides), tmp_path / "run")
    assert result.best_possible_auc - 0.03 < result.summary.auc < result.best_possible_auc


if __name__ == "__main__":
    from small_run import make_dataset

    with tempfile.TemporaryDirectory() as scratch:
        dataset = make_dataset(Path(scratch) / "data")
        curves = {model: measure(dataset, Path(scratch) / model, model) for model in MODELS}
    CURVES.write_text(json.dumps(curves, indent=1) + "\n")
