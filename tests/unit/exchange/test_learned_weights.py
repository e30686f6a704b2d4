"""Weights of ids that are learned get the gradient that torch's own operators give them."""

import pytest
import torch
from torch.nn import functional

import pibroch as pb

TABLES = [
    pb.Table("sum", 20, 4, features=("a", "b")),
    pb.Table("mean", 20, 4, features=("c",), pooling="mean"),
    pb.Table("wide", 20, 8, features=("a",)),
    pb.Table("none", 20, 3, features=("c",), pooling="none"),
]
SIZE = 5


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * SIZE,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator).requires_grad_()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return pb.JaggedBatch(
        torch.zeros(SIZE, 0), ("c", "a", "b"), values, offsets, torch.zeros(SIZE), weights
    )


def by_torch(embeddings, batch, weights):
    """The same by torch alone: its embeddings by name, and the tables."""
    tables = {
        view.piece.table.name: torch.tensor(view.weights[:], requires_grad=True)
        for view in embeddings.pieces()
    }
    embedded = {}
    for table in embeddings.tables:
        for feature in table.features:
            place = batch.keys.index(feature)
            ends = batch.offsets[place * SIZE : (place + 1) * SIZE + 1]
            span = slice(int(ends[0]), int(ends[-1]))
            rows = (
                functional.embedding(batch.values[span], tables[table.name]) * weights[span, None]
            )
            parts = rows.split((ends[1:] - ends[:-1]).tolist())
            if table.pooling == "none":
                embedded[feature, table.name] = rows
                continue
            pooled = torch.stack([part.sum(0) for part in parts])
            if table.pooling == "mean":
                pooled = pooled / torch.tensor([max(1, len(part)) for part in parts])[:, None]
            embedded[feature, table.name] = pooled
    return embedded, tables


@pytest.mark.parametrize(
    "tables", [TABLES, TABLES[:2], TABLES[:1]], ids=["any", "one dim", "one table"]
)
@pytest.mark.parametrize("trains", [True, False])
def test_weights_and_rows_get_the_gradients_of_torch(tables, trains):
    optimizers = {"": pb.SGD(lr=1.0), tables[-1].name: pb.SGD(lr=0.5)}
    embeddings = pb.Embeddings(tables, optimizers, seed=1).train(trains)
    batch = make_batch()
    weights = batch.weights.detach().clone().requires_grad_()
    expected, whole = by_torch(embeddings, batch, weights)
    out = embeddings(batch)
    if isinstance(out, torch.Tensor):
        embedded = {
            key: out[:, place]
            for place, key in enumerate((f, table.name) for table in tables for f in table.features)
        }
    else:
        names = {name: name.split("@") for name in out}
        readers = {f: table.name for table in tables for f in table.features}
        embedded = {
            (parts[0], parts[1] if len(parts) > 1 else readers[parts[0]]): part
            for name, parts in names.items()
            for part in [out[name] if isinstance(out[name], torch.Tensor) else out[name].values]
        }
    assert embedded.keys() == expected.keys()
    for key, right in expected.items():
        torch.testing.assert_close(embedded[key], right)
    sum((part**2).sum() for part in embedded.values()).backward()
    sum((part**2).sum() for part in expected.values()).backward()
    torch.testing.assert_close(batch.weights.grad, weights.grad)
    for view in embeddings.pieces():
        name = view.piece.table.name
        rate = optimizers.get(name, optimizers[""]).lr if trains else 0.0
        torch.testing.assert_close(
            torch.tensor(view.weights[:]), whole[name].detach() - rate * whole[name].grad
        )


def test_without_gradients_they_are_weights_like_any_other():
    embeddings = pb.Embeddings(TABLES[:2], pb.SGD(lr=1.0))
    batch = make_batch()
    with torch.no_grad():
        assert torch.equal(embeddings(batch), embeddings(make_batch()))
        assert not embeddings(batch).requires_grad
