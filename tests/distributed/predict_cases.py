"""What each rank does in the tests of bulk scoring."""

from pathlib import Path

import torch

from pibroch.collectives.world import World
from pibroch.data import EncodedDataset
from pibroch.score.ranks import score_split_by_ranks


def score(channel, run, data, split, out, bound):
    """What was done, and what rank 0 was told of progress."""
    steps = []
    torch.set_num_threads(1)
    done = score_split_by_ranks(
        Path(run),
        EncodedDataset.open(Path(data)),
        split,
        Path(out),
        World(channel.ranks, channel),
        bound,
        steps.append,
    )
    return done, sum(steps), channel.ranks.rank
