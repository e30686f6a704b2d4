"""What ranks do in the tests of `pibroch.sim`: training, with bytes noted step by step."""

from collections import Counter

import numpy as np
import torch

import pibroch as pb
from pibroch.embedding import group_tables
from pibroch.exchange import place_towers
from pibroch.exchange.towers.build import TowerLayout
from pibroch.exchange.towers.exchange import TowersExchange
from pibroch.exchange.towers.modules import TowerOutputs
from pibroch.exchange.towers.places import hosts_of
from pibroch.models import build_model
from pibroch.planner import Plan
from pibroch.sim.counting import Job
from pibroch.sim.counting_towers import ByTowers, PlacedModules, plan_of

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


def job(num_ranks, placement, wire="float32"):
    made = tables()
    plan = Plan.of(made, num_ranks, placement)
    return Job(group_tables(made, OPTIMIZER), plan, batch_of, wire=wire)


def job_by_towers(num_ranks, ranks_per_host, has_modules=False, wire="float32", **options):
    """The job, and who looks up what."""
    made = tables(8 if has_modules else 4)
    groups = group_tables(made, OPTIMIZER)
    options |= {"groups": GROUPS} if has_modules else {}
    layout = TowerLayout.of(pb.Towers(**options), groups, hosts_of(num_ranks, ranks_per_host))
    modules = None
    if has_modules:
        widths = TowerOutputs.of(tower_model(), made, layout.here).widths
        modules = PlacedModules(widths, [1 / len(widths)] * len(widths), [0] * len(widths))
    job = Job(groups, plan_of(layout), batch_of, wire=wire)
    return job, ByTowers(layout.places, layout.here, modules)


def sent_by_step(channel, exchange, num_steps, has_modules=False, **options):
    """Bytes to each rank so far, after each step; the communication thread has done its work."""
    made = tables(8 if has_modules else 4)
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
    for batch in embeddings.feed(batch_of(step, channel.ranks.rank) for step in range(num_steps)):
        if model is not None:
            model(batch.dense, lambda batch=batch: embeddings(batch)).sum().backward()
        else:
            sum(each.sum() for each in embeddings(batch).values()).backward()
        channel.ranks.communication.flush()
        sent = _sent(channels)
        counts.append([sent[p] - before[p] for p in range(channel.ranks.world_size)])
    return counts


def _sent(channels):
    total = Counter()
    for each in channels:
        total += each.sent_to
    return total
