"""Forward passes that are made again inside backward.

The lookups in them read what they read before, or are refused.
"""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import pibroch as pb
from clicked_model import ids
from pibroch.errors import TrainingError


def selective(function, *inputs):
    def save_products(_, op, *args, **kwargs):
        saves = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(save_products),
    )


def on_cpu(function, *inputs):
    with torch.autograd.graph.save_on_cpu():
        return function(*inputs)


WAYS = {
    "plain": lambda function, *inputs: function(*inputs),
    "checkpoint": lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False),
    "nested": lambda function, *inputs: checkpoint(
        lambda *x: checkpoint(function, *x, use_reentrant=False), *inputs, use_reentrant=False
    ),
    "selective": selective,
    "saved on the CPU": on_cpu,
}


class Blocks(nn.Module):
    """Three blocks, each of which looks the same table up.

    Blocks 1 and 2 want rows that later blocks update.
    """

    def __init__(self, ways, optimizer=None, fixed=False):
        super().__init__()
        torch.manual_seed(0)
        self.table = pb.Embeddings(
            [pb.Table("a", 6, 4)], optimizer or pb.Adam(lr=0.5, weight_decay=0.1), seed=1
        )
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.ways = ways
        self.batches = [ids(1, 2), ids(2, 3), ids(1, 3)] if fixed else None

    def block(self, number, x):
        batch = [(1, 2), (2, 3), (1, 3)][number]
        rows = self.table(self.batches[number] if self.batches else ids(*batch))[:, 0]
        return nn.functional.dropout(self.layers[number](x * rows + rows), 0.25).tanh()

    def forward(self, x):
        for number, way in enumerate(self.ways):
            x = WAYS[way](lambda x, number=number: self.block(number, x), x)
        return x.square().sum()


def train(ways, **options):
    model = Blocks(ways, **options)
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4, requires_grad=True)).backward()
        optimizer.step()
    return [p.grad for p in model.layers.parameters()], model.table.shard.records.copy(), model


@pytest.mark.parametrize("fixed", [False, True], ids=["batches made inside", "batches kept"])
@pytest.mark.parametrize(
    "ways",
    [
        ("checkpoint",) * 3,
        ("plain", "checkpoint", "plain"),
        ("checkpoint", "plain", "checkpoint"),
        ("nested", "nested", "plain"),
        ("selective",) * 3,
        ("saved on the CPU", "checkpoint", "plain"),
    ],
)
def test_gradients_and_rows_have_the_bits_of_a_pass_without(ways, fixed):
    want, want_rows, _ = train(("plain",) * 3)
    got, rows, model = train(ways, fixed=fixed)
    assert all(map(torch.equal, got, want)) and (rows == want_rows).all()
    assert model.table.step == 6, "an update for each lookup, none for those that were repeated"
    gc.collect()
    assert not model.table._kept._kept, "nothing is kept for longer than the graph"


def test_what_users_write_into_embeddings_is_not_in_what_was_kept():
    tables = [pb.Table("a", 6, 4), pb.Table("b", 6, 3)]
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(2, 0), ["a", "b"], torch.tensor([[1, 2], [3, 4]]), torch.zeros(2)
    )
    results = []
    for way in ("plain", "checkpoint"):
        embeddings = pb.Embeddings(tables, pb.SGD(lr=1.0), seed=1)
        x = torch.ones(2, 7, requires_grad=True)
        WAYS[way](lambda x, e=embeddings: x * e(batch).cat().mul_(2.0), x).sin().sum().backward()
        results.append([x.grad, *embeddings.full_state_dict().values()])
    assert all(map(torch.equal, *results))


def test_what_is_kept_goes_with_the_pass_or_the_graph():
    model = Blocks(("checkpoint",) * 3)
    loss = model(torch.ones(2, 4))
    assert len(model.table._kept._kept) == 3
    loss.backward()
    assert not model.table._kept._kept, "though the loss is still there"
    loss = model(torch.ones(2, 4))
    del loss
    gc.collect()
    assert not model.table._kept._kept


def test_two_passes_over_blocks_of_one_graph():
    """Gradients of inputs alone, then everything: rows are updated by the second."""
    model = Blocks(("checkpoint",) * 3)
    want = Blocks(("plain",) * 3)
    results = []
    for each in (model, want):
        torch.manual_seed(5)
        x = torch.ones(2, 4, requires_grad=True)
        loss = each(x)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        before = each.table.step
        loss.backward()
        results.append([first, x.grad, *(p.grad for p in each.layers.parameters())])
        assert before == 0 and each.table.step == 3
    assert all(map(torch.equal, *results))
    assert (model.table.shard.records == want.table.shard.records).all()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_reentrant_checkpointing_is_refused_before_a_row_has_moved(num_blocks):
    table = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=1.0))
    layer = nn.Linear(4, 4)
    before = table.shard.records.copy()
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(num_blocks):
        x = checkpoint(lambda x: layer(x + table(ids(1, 2))[:, 0]), x, use_reentrant=True)
    with pytest.raises(TrainingError, match="use_reentrant=False"):
        x.sum().backward()
    assert (table.shard.records == before).all()
    layers = nn.Sequential(layer, nn.Tanh(), layer)
    rows = checkpoint_sequential(layers, 2, table(ids(1, 2))[:, 0], use_reentrant=True)
    rows.sum().backward()
    assert table.step == 1, "what it says to do: lookups before the block"


def test_frozen_and_evaluated_tables_are_looked_up_again():
    table = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=1.0))
    layer = nn.Linear(4, 4)
    for reentrant in (False, True):
        for change in (lambda: table.requires_grad_(False), table.eval):
            change()
            x = torch.ones(2, 4, requires_grad=True)
            checkpoint(
                lambda x: layer(x * table(ids(1, 2))[:, 0]).tanh(), x, use_reentrant=reentrant
            ).sum().backward()
            torch.testing.assert_close(
                x.grad, torch.autograd.grad(layer(x * table(ids(1, 2))[:, 0]).tanh().sum(), x)[0]
            )
            table.requires_grad_().train()


def test_a_lookup_without_gradients_in_a_pass_that_moved_rows_is_refused():
    """It is in the forward pass of a block that is repeated, where it read the rows before."""
    table = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=1.0))
    layer = nn.Linear(4, 4)

    def block(x):
        with torch.no_grad():
            rows = table(ids(1, 2))[:, 0]
        return layer(x * rows).tanh()

    x = checkpoint(block, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
    with pytest.raises(TrainingError, match="inside a backward pass that has updated rows"):
        (x * table(ids(2, 3))[:, 0]).sum().backward()
    with torch.no_grad():
        assert table(ids(1)).shape == (1, 1, 4), "after the pass there is no pass"


def test_equal_lookups_around_an_update_are_refused():
    table = pb.Embeddings([pb.Table("a", 6, 4)], pb.SGD(lr=1.0))
    layer = nn.Linear(4, 4)

    def loss():
        x = torch.ones(2, 4, requires_grad=True)
        block = lambda x: layer(x * table(ids(1, 2))[:, 0]).tanh()  # noqa: E731
        return checkpoint(block, x, use_reentrant=False).sum()

    first = loss()
    table(ids(1, 2)).sum().backward()
    second = loss()
    with pytest.raises(TrainingError, match="before and after an update"):
        second.backward()
    del second
    gc.collect()
    first.backward()
