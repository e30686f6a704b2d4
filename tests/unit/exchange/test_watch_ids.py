"""Who watches a module's raw ids is told what each step changes."""

import copy

import pytest
import torch

import pibroch as pb
from pibroch.errors import ConfigError


def batch_of(*ids):
    values = torch.tensor([ids])
    labels = torch.zeros(len(ids))
    return pb.JaggedBatch.from_one_hot(torch.zeros(len(ids), 0), ["user"], values, labels)


def step(embeddings, *ids):
    embeddings(batch_of(*ids)).sum().backward()


def module():
    kind = pb.Hashed(expire_after=2)
    return pb.Embeddings([pb.Table("user", 3, 2, rows=kind)], pb.SGD(lr=1.0))


def test_each_step_with_its_number():
    embeddings = module()
    seen = []

    def note(number, changes):
        assert number == embeddings.step + 1, "before the update"
        each = changes["user"]
        parts = each.fresh_ids, each.evicted_ids, each.expired_ids
        seen.append((number, *(part.tolist() for part in parts)))

    embeddings.watch_ids(note)
    step(embeddings, 7, -5)
    with torch.no_grad():
        embeddings(batch_of(8))
    embeddings.eval()
    embeddings(batch_of(9))
    embeddings.train()
    step(embeddings, 11, 12)
    step(copy.deepcopy(embeddings), 20)
    step(embeddings, 11)
    first = embeddings(batch_of(1))
    (first.sum() + embeddings(batch_of(2)).sum()).backward()
    assert seen == [
        (1, [-5, 7], [], []),
        (2, [11, 12], [-5], []),
        (3, [], [], [7]),
        (4, [1], [], [12]),
        (4, [2], [], []),
    ]


def test_without_raw_ids_there_is_nothing_to_watch():
    embeddings = pb.Embeddings([pb.Table("user", 3, 2)], pb.SGD(lr=1.0))
    with pytest.raises(ConfigError, match=r"watch_ids\(\) without a table of raw ids"):
        embeddings.watch_ids(print)
