"""What ranks do in the tests of `pibroch.sim`: training, with bytes noted step by step."""

from collections import Counter

import numpy as np
import torch

import pibroch as pb
from pibroch.embedding import group_tables
from pibroch.planner import Plan
from pibroch.sim.counting import Job

BATCH_SIZE = 40
OPTIMIZER = pb.Adagrad(lr=0.1)


def tables():
    return [pb.Table("x", 300, 8), pb.Table("y", 50, 8), pb.Table("z", 200, 4, features=("z", "w"))]


def batch_of(step, rank):
    """Skewed bags, of other sizes on each rank."""
    rng = np.random.default_rng([step, rank])
    size = BATCH_SIZE + 5 * rank
    keys = ["x", "y", "z", "w"]
    lengths = rng.integers(0, 4, len(keys) * size)
    rows = np.repeat([300, 50, 200, 200], size)
    values = (rng.random(lengths.sum()) ** 3 * np.repeat(rows, lengths)).astype(np.int64)
    return pb.JaggedBatch(
        torch.rand(size, 1),
        tuple(keys),
        torch.from_numpy(values),
        torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        torch.zeros(size),
    )


def job(num_ranks, placement, wire="float32"):
    made = tables()
    plan = Plan.of(made, num_ranks, placement)
    return Job(group_tables(made, OPTIMIZER), plan, batch_of, wire=wire)


def sent_by_step(channel, exchange, num_steps, **options):
    """Bytes to each rank so far, after each step; the communication thread has done its work."""
    embeddings = pb.Embeddings(
        tables(), OPTIMIZER, exchange=exchange, seed=3, channel=channel, **options
    )
    rank = channel.ranks.rank
    before = Counter(channel.sent_to)  # the channel is that of other cases as well
    counts = []
    for batch in embeddings.feed(batch_of(step, rank) for step in range(num_steps)):
        sum(each.sum() for each in embeddings(batch).values()).backward()
        channel.ranks.communication.flush()
        counts.append([channel.sent_to[p] - before[p] for p in range(channel.ranks.world_size)])
    return counts
