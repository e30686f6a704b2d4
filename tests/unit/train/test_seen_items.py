"""Items that groups had, against plain Python."""

import numpy as np
import pytest
import torch

from pibroch.data import Loader
from pibroch.data.dataset import Bags, Split
from pibroch.data.kernels.text import EMPTY_CODE
from pibroch.train.all_items import _places
from pibroch.train.seen_items import SeenItems

NUM_GROUPS = 12


def bags(rng, num_samples):
    lengths = rng.integers(0, 4, num_samples)
    offsets = np.concatenate([[0], lengths.cumsum()])
    return Bags(rng.integers(0, 100, offsets[-1]).astype(np.int32), offsets)


def split_of(rng, num_samples):
    """Ids below 100, some of which are no items; the last group is that of nobody."""
    groups = rng.integers(0, NUM_GROUPS, num_samples).astype(np.uint64) << np.uint64(60)
    groups[rng.random(num_samples) < 0.2] = EMPTY_CODE
    return Split(
        "train",
        ("item", "last", "history"),
        (),
        labels=(rng.random(num_samples) < 0.7).astype(np.uint8),
        dense=np.empty((num_samples, 0), np.float32),
        ids=rng.integers(0, 100, (num_samples, 2)).astype(np.int32),
        bags={"history": bags(rng, num_samples)},
        groups=groups,
    )


def had(split, number, histories):
    """The items of a sample's histories."""
    found = set()
    if "last" in histories:
        found.add(int(split.ids_of("last")[number]))
    if "history" in histories:
        of_all = split.bags["history"]
        found |= {*of_all.values[of_all.offsets[number] : of_all.offsets[number + 1]].tolist()}
    return found


@pytest.mark.parametrize("sizes", [(200, 200), (200, 0), ()])
@pytest.mark.parametrize("histories", [(), ("history",), ("last", "history")])
def test_items_that_a_group_had_are_left_out_but_for_the_wanted_one(histories, sizes):
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice(100, 30, replace=False))
    before = [split_of(rng, size) for size in sizes]
    split = split_of(rng, 80)
    users, items = (torch.from_numpy(rng.normal(size=(n, 3))) for n in (80, len(ids)))
    wanted = rng.choice(ids, 80)
    seen = SeenItems.of(before, "item", histories, ids)
    (batch,) = Loader(split, 80)
    chosen = split.labels > 0
    found = _places(users[chosen], wanted[chosen], ids, items, seen.by(batch, chosen))
    assert len(found) == chosen.sum() < 80
    for place, number in zip(found, np.flatnonzero(chosen), strict=True):
        left_out = had(split, number, histories)
        group = split.groups[number]
        for each in before if group != EMPTY_CODE else ():
            for other in np.flatnonzero(each.groups == group):
                left_out |= had(each, other, histories)
                left_out |= {int(each.ids_of("item")[other])} if each.labels[other] else set()
        scores = (items @ users[number]).tolist()
        own = scores[ids.tolist().index(wanted[number])]
        rest = [
            score for id_, score in zip(ids.tolist(), scores, strict=True) if id_ not in left_out
        ]
        assert place == sum(score > own for score in rest)
