"""A model of torch's operations alone, with its lookups, against the checkpoint's predictor."""

import pytest
import torch
from torch import nn

import pibroch as pb
from pibroch.config import model_zoo
from pibroch.data import EncodedDataset, Loader
from pibroch.serve.export import SavedRows
from pibroch.serve.from_checkpoint import read_verified
from pibroch.serve.inputs import encoded_inputs, encoded_tensors
from pibroch.serve.whole_model import Bags, WholeModel
from pibroch.state.checkpoint_folder import find_checkpoint
from raw_clicks import RAW_IDS, prepared, raw_rows
from several_labels import prepared as prepared_labels
from small_run import make_config, train_here

HASHED = "{name='hashed', capacity=30, admit_after=2"
SEQUENCES = ("din", "bst", "sasrec")


def whole(path, min_count=1):
    folder = find_checkpoint(path)
    return WholeModel.of(SavedRows.of(folder, read_verified(folder), min_count))


def check_same(model, path, data, batch_sizes=(1, 7, 200)):
    predictor = pb.Predictor.open(path)
    split = EncodedDataset.open(data).split("test")
    for size in batch_sizes:
        batch = next(iter(Loader(split, size)))
        scores, logits = model(*encoded_tensors(predictor.schema, batch).values())
        torch.testing.assert_close(scores.double(), predictor(batch), atol=1e-6, rtol=0)
        torch.testing.assert_close(logits, predictor.logits(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["dlrm", "dcnv2", *(spec.name for spec in model_zoo.SPECS), *SEQUENCES]
)
def test_scores_are_the_predictors(clicks, tmp_path, name):
    options = [f"model.name={name}", "train.steps=5", "train.average=0.9"]
    if name in SEQUENCES:
        options += ["model={histories={tags='city'}, max_length=2, attention_heads=2}"]
    run, _ = train_here(make_config(clicks.data, *options), tmp_path / "run")
    check_same(whole(run.path), run.path, clicks.data)


def test_several_tasks(tmp_path):
    data = prepared_labels(tmp_path)
    options = ["model.name=mmoe", "train.steps=5", "tasks.seconds.loss={name='mse'}"]
    run, _ = train_here(make_config(data, *options), tmp_path / "run")
    model = whole(run.path)
    check_same(model, run.path, data)
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 9)))
    assert model(*encoded_tensors(model.schema, batch).values())[0].shape == (9, 2)


@pytest.mark.parametrize("others", ["}", ", unknown_row=true}"])
def test_raw_ids(tmp_path, others):
    data = prepared(tmp_path / "data", raw_rows(900), text=RAW_IDS)
    rows = [f"embedding.tables.{name}.rows={HASHED}{others}" for name in ("user", "tags")]
    run, _ = train_here(make_config(data, "train.steps=9", *rows), tmp_path / "run")
    model = whole(run.path)
    known, _ = model.tables["user"].raw
    batch = next(iter(Loader(EncodedDataset.open(data).split("test"), 200)))
    tensors = encoded_tensors(model.schema, batch)
    has_row = torch.isin(tensors["ids"][:, 0], known)
    assert has_row.any() and not has_row.all(), "of both kinds"
    check_same(model, run.path, data)
    some = whole(run.path, min_count=4)
    assert 0 < len(some.tables["user"].raw[0]) < len(known)
    assert some.num_rows < model.num_rows
    none = whole(run.path, min_count=10**6)
    assert none(*tensors.values())[0].isfinite().all()


def test_what_does_not_fit_is_refused(clicks):
    model = whole(clicks.run)
    names = [each["name"] for each in encoded_inputs(model.schema)]
    assert names == ["dense", "ids", "tags.values", "tags.lengths"] == list(model.inputs)
    batch = next(iter(Loader(EncodedDataset.open(clicks.data).split("test"), 5)))
    good = encoded_tensors(model.schema, batch)
    for name, place, value, message in (
        ("ids", (0, 0), -1, "an id of user outside 0 to"),
        ("ids", (0, 2), 8, "an id of slot outside 0 to 7"),
        ("tags.values", 0, 10**6, "an id of tags outside 0 to"),
        ("tags.lengths", 0, 77, "lengths that do not sum"),
    ):
        bad = {key: tensor.clone() for key, tensor in good.items()}
        bad[name][place] = value
        with pytest.raises(RuntimeError, match=message):
            model(*bad.values())


def test_bags_at_both_ends():
    weights = torch.arange(6.0)[:, None].flip(0).contiguous()
    bags = Bags(weights, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]))
    assert bags.summed().squeeze(1).tolist() == [9, 0, 3]
    assert bags.padded(2).squeeze(2).tolist() == [[5, 4], [0, 0], [3, 0]]
    assert bags.padded(1, last=True).squeeze(2).tolist() == [[4], [0], [3]]
    assert bags.padded(3, last=True).squeeze(2).tolist() == [[0, 5, 4], [0, 0, 0], [0, 0, 3]]
    for last in (False, True):
        assert torch.equal(bags.mask(3, last), bags.padded(3, last).squeeze(2) > 0)


def test_features_that_share_a_table_and_no_dense_features(tmp_path):
    from pibroch.data.schema import CategoricalFeature, Schema
    from pibroch.serve.whole_model import Rows

    first = CategoricalFeature(name="a", column="a")
    schema = Schema(
        label="y", categorical=(first, CategoricalFeature(name="b", column="b", shares="a"))
    )

    class Second(nn.Module):
        def forward(self, dense, embedded):
            assert dense.shape == (3, 0)
            return embedded[:, 1, 0]

    weights = torch.tensor([[1.0], [2.0], [0.0]])
    model = WholeModel(schema, Second(), weights, {"a": Rows(0, 2, None, 2)})
    _, logits = model(torch.tensor([[0, 1], [0, 0], [1, 1]]))
    assert logits.tolist() == [2, 1, 2]
