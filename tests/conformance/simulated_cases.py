"""What ranks do in the tests of `pibroch.sim`: training, with bytes noted step by step."""

from collections import Counter
from functools import partial
from itertools import islice

import exchanges  # noqa: F401  with that of examples
import numpy as np
import torch

import pibroch as pb
from pibroch.data import EncodedDataset, Loader
from pibroch.embedding import group_tables
from pibroch.exchange import place_towers
from pibroch.exchange.towers.build import TowerLayout
from pibroch.exchange.towers.exchange import TowersExchange
from pibroch.exchange.towers.modules import TowerOutputs
from pibroch.exchange.towers.places import hosts_of
from pibroch.models import build_model
from pibroch.planner import Plan
from pibroch.sim.counting import Job, gradients_of
from pibroch.sim.towers import PlacedModules

BATCH_SIZE = 40
OPTIMIZER = pb.Adagrad(lr=0.1)


FEATURES = ("x", "y", "z", "w")
GROUPS = (("z", "w"), ("x",), ("y",))


def tables(last_dim=4):
    last = pb.Table("z", 200, last_dim, features=("z", "w"))
    return [pb.Table("x", 300, 8), pb.Table("y", 50, 8), last]


def tower_model():
    """Of tables of one dim; its towers give 12, 8 and 8 numbers a sample."""
    towers = {"groups": GROUPS, "width": 4, "combined": 1}
    return build_model(
        "tower_dlrm", 1, len(FEATURES), FEATURES, dim=8, bottom=(8,), top=(8,), towers=towers
    )


def batch_of(step, rank):
    """Skewed bags, of other sizes on each rank."""
    rng = np.random.default_rng([step, rank])
    size = BATCH_SIZE + 5 * rank
    keys = FEATURES
    lengths = rng.integers(0, 4, len(keys) * size)
    rows = np.repeat([300, 50, 200, 200], size)
    values = (rng.random(lengths.sum()) ** 3 * np.repeat(rows, lengths)).astype(np.int64)
    return pb.JaggedBatch(
        torch.rand(size, 1),
        keys,
        torch.from_numpy(values),
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        torch.zeros(size),
    )


def job(num_ranks, placement, exchange=None):
    made = tables()
    plan = Plan.of(made, num_ranks, placement)
    return Job(group_tables(made, OPTIMIZER), plan, batch_of, exchange or pb.AllToAll(), seed=3)


def job_by_towers(num_ranks, ranks_per_host, has_modules=False, **options):
    """The job under towers."""
    made = tables(8 if has_modules else 4)
    groups = group_tables(made, OPTIMIZER)
    options |= {"groups": GROUPS} if has_modules else {}
    towers = pb.Towers(ranks_per_host=ranks_per_host, **options)
    modules = None
    if has_modules:
        layout = TowerLayout.of(towers, groups, hosts_of(num_ranks, ranks_per_host))
        widths = TowerOutputs.of(tower_model(), made, layout.here).widths
        modules = PlacedModules(widths, [1 / len(widths)] * len(widths), [0] * len(widths))
    any_plan = Plan.of(made, num_ranks, "row_wise")
    return Job(groups, any_plan, batch_of, modules=modules, seed=3).under(towers)


def raw_tables():
    """Of raw ids, which are given rows, and lose them, in the first steps."""
    rows = pb.Hashed(admit=pb.AfterCount(2))
    return [
        pb.Table("x", 120, 8, rows=rows),
        pb.Table("y", 50, 8),
        pb.Table("z", 120, 4, features=("z", "w"), rows=rows),
    ]


def raw_job(num_ranks, exchange):
    made = raw_tables()
    plan = Plan.of(made, num_ranks, "row_wise")
    return Job(group_tables(made, OPTIMIZER), plan, batch_of, exchange, seed=3)


def dataset_tables(dataset):
    return [pb.Table(name, rows, 8) for name, rows in dataset.num_rows.items()]


def loader_of(dataset, rank, num_ranks):
    """Samples of one data set, 40 for each rank."""
    split = dataset.split("train")
    return Loader(split, 40 * num_ranks, shuffle=True, seed=2, part=(rank, num_ranks))


def assigned_job(data, num_ranks, exchange):
    dataset = EncodedDataset.open(data)
    made = dataset_tables(dataset)
    plan = Plan.of(made, num_ranks, "row_wise")
    loader = partial(loader_of, dataset, num_ranks=num_ranks)
    groups = group_tables(made, OPTIMIZER)
    return Job(groups, plan, batch_of, exchange, seed=3, loader_of=loader)


def own_job(num_ranks):
    """Under the exchange of ``examples/own_exchange.py``."""
    made = tables()
    groups = group_tables(made, OPTIMIZER)
    return Job(groups, Plan.of(made, num_ranks), batch_of, "ask_first", seed=3)


def sent_by_step(
    channel, exchange, num_steps, has_modules=False, has_raw_ids=False, data=None, **options
):
    """Bytes to each rank so far, after each step; the communication thread has done its work."""
    made = raw_tables() if has_raw_ids else tables(8 if has_modules else 4)
    batches = (batch_of(step, channel.ranks.rank) for step in range(num_steps))
    if data is not None:
        dataset = EncodedDataset.open(data)
        made = dataset_tables(dataset)
        batches = loader_of(dataset, channel.ranks.rank, channel.ranks.world_size)
    options |= {"groups": GROUPS} if has_modules else {}
    embeddings = pb.Embeddings(
        made, OPTIMIZER, exchange=exchange, seed=3, channel=channel, **options
    )
    model = place_towers(tower_model(), embeddings) if has_modules else None
    channels = [channel]
    if isinstance(embeddings.exchange, TowersExchange):
        channels.append(embeddings.exchange.inner_wire.channel)
    before = _sent(channels)  # the channel is that of other cases as well
    counts = []
    for batch in islice(embeddings.feed(batches), num_steps):
        if model is not None:
            model(batch.dense, lambda batch=batch: embeddings(batch)).sum().backward()
        else:
            # as counted: what is in messages decides how far they are compressed
            given = embeddings(batch)
            given = [given] if isinstance(given, torch.Tensor) else [given.cat()]
            torch.autograd.backward(given, gradients_of(given))
        channel.ranks.communication.flush()
        sent = _sent(channels)
        counts.append([sent[p] - before[p] for p in range(channel.ranks.world_size)])
    return counts


def _sent(channels):
    total = Counter()
    for each in channels:
        total += each.sent_to
    return total
