"""What each rank does in the tests of torch's tools around tables of several ranks."""

import copy

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pibroch as pb
from pibroch.errors import ConfigError

TABLES = [pb.Table("a", 40, 4), pb.Table("b", 30, 4)]
STEPS = 7
SKIPPED = 3


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        numbers = torch.randint(0, 30, (2, 5), generator=generator)
        yield pb.JaggedBatch.from_one_hot(torch.ones(5, 1), ["a", "b"], numbers, torch.zeros(5))


def made(exchange):
    options = {"ranks_per_host": 1} if exchange == "towers" else {}
    return pb.Embeddings(TABLES, pb.Adam(lr=0.1, weight_decay=0.1), exchange, seed=1, **options)


def state(embeddings):
    return {
        name: tensor.clone()
        for name, tensor in embeddings.full_state_dict(on_all_ranks=True, row_state=True).items()
    }


def scaled(channel, exchange, how):
    """Train with a gradient scaler.

    In one step rank 1's gradient of rows alone overflows, or that step trains nothing at all.
    """
    embeddings = made(exchange)
    rank = channel.ranks.rank
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "overflows")
    scales = []
    for step, batch in enumerate(embeddings.feed(batches(rank))):
        if step == SKIPPED and how == "left out":
            with torch.no_grad():
                embeddings(batch)
            continue
        rows = embeddings(batch)
        if step == SKIPPED and how == "overflows" and rank == 1:
            rows.register_hook(lambda gradient: gradient * torch.nan)
        scaler.scale(net(rows.flatten(1)).square().mean()).backward()
        if step != SKIPPED:
            scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        scales.append(scaler.get_scale())
    return state(embeddings), embeddings.step, scales


def recomputed(channel, exchange, way):
    """Two blocks look up the same tables, the first under activation checkpointing.

    A backward pass makes the first again after the second's update.
    """
    embeddings = made(exchange)
    torch_rows = []
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    sent = []
    for batch in embeddings.feed(batches(channel.ranks.rank)):
        x = torch.ones(5, 8)
        for layer in layers:
            block = lambda x, layer=layer, b=batch: layer(x * embeddings(b).flatten(1)).tanh()  # noqa: E731
            x = block(x) if way == "plain" else checkpoint(block, x, use_reentrant=False)
        before = channel.ranks.traffic.sent
        x.square().mean().backward()
        embeddings.exchange.flush()
        sent.append(channel.ranks.traffic.sent - before)
        torch_rows.append(layers[0].weight.grad.clone())
    return state(embeddings), torch_rows, sent


def frozen(channel, exchange):
    """A model around tables is frozen for some batches of a feed.

    Returns rows before, after, and after it was thawed.
    """
    embeddings = made(exchange)
    model = nn.ModuleDict({"table": embeddings, "net": nn.Linear(8, 1)})
    result = [state(embeddings)]
    for frozen in (True, False):
        model.requires_grad_(not frozen)
        for batch in embeddings.feed(batches(channel.ranks.rank)):
            x = torch.ones(5, 8, requires_grad=True)
            model["net"](x * embeddings(batch).flatten(1)).sum().backward()
        result.append(state(embeddings))
    return result, embeddings.step


def copied(channel, exchange):
    """The words with which copies are refused."""
    embeddings = made(exchange)
    next(iter(embeddings.feed(batches(channel.ranks.rank))))
    try:
        copy.deepcopy(nn.Sequential(embeddings))
    except ConfigError as error:
        return str(error)


def same(one, other):
    return all(np.array_equal(one[name].numpy(), other[name].numpy()) for name in one)


class Wrapped(nn.Module):
    """A model around tables, as wrappers get it."""

    def __init__(self):
        super().__init__()
        self.table = made("alltoall")
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.net(self.table(batch).flatten(1))


def wrapped(channel, how):
    """Train a model under one of torch's wrappers; returns losses and rows."""
    model = Wrapped()
    if how == "data_parallel":
        wrapper = pb.data_parallel(model)
    elif how == "ddp":
        wrapper = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (channel.ranks.world_size,))
        fully_shard(model.net, mesh=mesh)
        wrapper = fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    losses = []
    for batch in model.table.feed(batches(channel.ranks.rank)):
        loss = wrapper(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, state(model.table)
