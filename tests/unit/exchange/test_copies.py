"""Copies of a model around tables learn on their own; what cannot be copied says so."""

import io
import logging
import pickle
from copy import deepcopy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pibroch as pb
from clicked_model import Clicks, ids, ones
from pibroch.embedding.narrow_rows import tensor_of
from pibroch.errors import ConfigError


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": saved}
TABLES = [
    pb.Table("a", 6, 4, features=("x", "y")),
    pb.Table("b", 5, 3, dtype="bfloat16"),
    pb.Table("s", 4, 4, pooling="none"),
]
OPTIMIZERS = {"": pb.Adagrad(lr=0.5, average=0.9), "b": pb.SGD(lr=0.5)}


def train(embeddings, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 4, (4, 3), generator=generator)
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(3, 0), ["x", "y", "b", "s"], numbers, torch.zeros(3)
    )
    out = embeddings(batch)
    (out.cat().square().sum() + out["s"].values.square().sum()).backward()


def state(embeddings):
    return {
        f"{view.piece.table.name}.{name}": torch.from_numpy(part.copy())
        if hasattr(part, "dtype") and part.dtype == "float32"
        else tensor_of(part).clone()
        for view in embeddings.pieces()
        for name, part in {"weights": view.weights, **view.state}.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_as_the_original_would_and_neither_moves_the_other(way):
    original = pb.Embeddings(TABLES, OPTIMIZERS, seed=1)
    original.learning_rate = 0.25
    train(original, 0)
    copied = WAYS[way](original)
    before = state(original)
    for seed in (1, 2):
        train(copied, seed)
    assert all(map(torch.equal, state(original).values(), before.values())), "the copy's alone"
    assert copied.step == 3 and original.step == 1
    for seed in (1, 2):
        train(original, seed)
    pairs = zip(state(original).values(), state(copied).values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "to the bit"
    assert copied.learning_rate == 0.25 and copied.training


@pytest.mark.parametrize("way", WAYS)
def test_a_whole_model_with_what_is_set_on_it(way):
    model = Clicks().bfloat16().eval()
    model.table.requires_grad_(False)
    copied = WAYS[way](model)
    assert not copied.training and not copied.table.anchor.requires_grad
    batch = ids(1, 2)
    x = ones(2, dtype=torch.bfloat16)
    assert torch.equal(copied(x, batch), model(x, batch))
    copied.requires_grad_().train()
    before = model.rows
    copied(x, batch).sum().backward()
    assert torch.equal(model.rows, before) and not torch.equal(copied.rows, before)


def test_torch_record_of_touched_rows_and_torchrec_modules_are_copied():
    from pibroch.torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    config = EmbeddingBagConfig(num_embeddings=6, embedding_dim=4, name="a", feature_names=["a"])
    original = EmbeddingBagCollection(tables=[config], optimizer=pb.SGD(lr=1.0))
    original.start_marks("full")
    copied = deepcopy(original)
    copied(ids(1, 2)).values().sum().backward()
    assert copied.shard.marks.of("full").tolist() == [False, True, True, False, False, False]
    assert not original.shard.marks.of("full").any()


@pytest.mark.parametrize("exchange", ["alltoall", "lookahead"])
def test_tables_that_other_processes_may_share_are_refused_in_words(exchange):
    for way in WAYS.values():
        with pytest.raises(ConfigError, match=r"a copy, or a pickle.*pibroch\.save"):
            way(Clicks(exchange=exchange))


@pytest.mark.parametrize("buffers", [False, True])
def test_an_average_of_the_parameters_says_that_rows_are_not_in_it(caplog, buffers):
    model = Clicks()
    with caplog.at_level(logging.WARNING, "pibroch"):
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    assert "AveragedModel" in caplog.text and "average=" in caplog.text
    model(ones(2), ids(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    mean.update_parameters(model)
    mean.update_parameters(model)
    assert torch.equal(mean.module.net[0].weight, model.net[0].weight)


def test_what_the_warning_says_to_do_averages_both():
    model = Clicks(pb.SGD(lr=0.5, average=0.5))
    mean = AveragedModel(model.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.5)
    rows = [model.rows]
    weights = []
    for _ in range(3):
        model(ones(2), ids(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(model.net)
        rows.append(model.rows)
        weights.append(model.net[0].weight.detach().clone())
    want_rows = rows[0]
    want = weights[0]
    for after in rows[1:]:
        want_rows = 0.5 * want_rows + 0.5 * after
    for after in weights[1:]:
        want = 0.5 * want + 0.5 * after
    with model.table.averaged(), torch.no_grad():
        got = model.table(ids(1, 2))[:, 0]
    torch.testing.assert_close(got, want_rows[1:3])
    torch.testing.assert_close(mean.module[0].weight, want)


def test_replicas_of_data_parallel_threads_are_refused():
    with pytest.raises(ConfigError, match=r"use pibroch\.data_parallel"):
        Clicks().table._replicate_for_data_parallel()  # as torch does for each of several GPUs
