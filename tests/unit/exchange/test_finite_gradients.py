"""Gradients that are not finite: an error before a row has moved, that says where."""

import copy

import pytest
import torch

import pibroch as pb
from clicked_model import Clicks, ids, ones
from pibroch.embedding import group_tables
from pibroch.errors import NonFiniteGradientError, TrainingError
from pibroch.exchange.finite import not_finite
from pibroch.exchange.output import OutputForm

NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("exchange", ["local", "alltoall", "lookahead"])
def test_rows_stay_and_the_next_step_is_as_ever(bad, place, exchange):
    optimizer = pb.Adam(lr=0.5, weight_decay=0.1)
    model = Clicks(optimizer, seed=1, exchange=exchange)
    twin = Clicks(optimizer, seed=1, exchange=exchange)
    steps = [ids(1, 2, 4), ids(1, 2, 3), ids(4, 3, 2)]
    for number, batch in enumerate(model.table.feed(steps)):
        loss = model(ones(3), batch)
        if number != 1:
            loss.sum().backward()
            twin(ones(3), steps[number]).sum().backward()
            continue
        with pytest.raises(NonFiniteGradientError, match=rf"step 2.*'a'.*sample {place}"):
            (loss * torch.tensor([bad if i == place else 1.0 for i in range(3)])).sum().backward()
        assert torch.equal(model.rows, twin.rows) and model.table.step == 1
    assert torch.equal(model.rows, twin.rows) and model.table.step == 2


def test_labels_that_are_no_numbers():
    model = Clicks()
    before = model.rows
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    labels = torch.tensor([1.0, NAN])
    with pytest.raises(NonFiniteGradientError, match="set_detect_anomaly"):
        loss(model(ones(2), ids(1, 2)), labels).backward()
    assert torch.equal(model.rows, before)


def test_a_second_backward_behind_an_error_is_one():
    embeddings = Clicks().table
    out = embeddings(ids(1)).sum() * NAN
    with pytest.raises(NonFiniteGradientError):
        out.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="a second backward"):
        out.backward()


def test_finite_gradients_whose_sum_overflows_pass():
    model = Clicks(pb.SGD(lr=1e-38))
    model.table(ids(1, 2)).mul(3e38).sum().backward()
    assert model.table.step == 1


def two_outputs():
    """Tables whose embeddings are two tensors: one pools, the other does not."""
    tables = [pb.Table("a", 6, 4), pb.Table("s", 6, 2, pooling="none")]
    return pb.Embeddings(tables, pb.SGD(lr=1.0), seed=1)


def two_features():
    offsets = torch.tensor([0, 1, 2, 4, 5])
    values = torch.tensor([1, 2, 3, 4, 5])
    return pb.JaggedBatch(torch.zeros(2, 0), ("a", "s"), values, offsets, torch.zeros(2))


@pytest.mark.parametrize(("feature", "sample"), [("a", 1), ("s", 0), ("s", 1)])
def test_every_tensor_of_a_lookup_counts_and_is_named(feature, sample):
    """With a scaler, too, which skips the step."""
    embeddings = two_outputs()
    before = copy.deepcopy(embeddings.full_state_dict())

    def loss(bad):
        out = embeddings(two_features())
        pooled, vectors = out["a"], out["s"].values
        factors = {"a": torch.ones(2), "s": torch.ones(3)}
        factors[feature][-1 if sample else 0] = bad
        return (pooled.sum(1) * factors["a"]).sum() + (vectors.sum(1) * factors["s"]).sum()

    with pytest.raises(NonFiniteGradientError, match=f"'{feature}'.*sample {sample}"):
        loss(NAN).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(INF)).backward()
    scaler.step(embeddings.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and embeddings.step == 0
    for name, tensor in embeddings.full_state_dict().items():
        assert torch.equal(tensor, before[name])
    loss(1.0).backward()
    assert embeddings.step == 1


def test_where_towers_run_inside_the_lookup_their_features_are_numbered():
    tables = [pb.Table(name, 4, 2) for name in "abc"]
    form = OutputForm(tables, group_tables(tables, pb.SGD(lr=1.0)))
    gradients = torch.zeros(5, 2, 2)
    gradients[3, 1, 0] = NAN
    error = not_finite(form.by_feature(two_features(), [gradients]), 7)
    assert "step 7" in str(error) and "feature 1 of this rank's towers" in str(error)
    assert "sample 3" in str(error)


def test_frozen_rows_and_lookups_by_weights_that_are_learned():
    model = Clicks()
    out = model(ones(2), ids(1, 2))
    model.table.requires_grad_(False)
    (out * INF).sum().backward()  # nothing is updated, so nothing is wrong
    model.table.requires_grad_(True)
    batch = ids(1, 2)
    weighted = pb.JaggedBatch(
        batch.dense,
        batch.keys,
        batch.values,
        batch.offsets,
        batch.labels,
        weights=torch.ones(2, requires_grad=True),
    )
    with pytest.raises(NonFiniteGradientError, match=r"'a'.*sample 1"):
        (model(ones(2), weighted) * torch.tensor([1.0, NAN])).sum().backward()
