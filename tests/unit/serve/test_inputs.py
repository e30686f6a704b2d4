import numpy as np
import pytest
import torch

import pibroch as pb
from pibroch.data.batch import JaggedBatch
from pibroch.serve.inputs import merged_batches, merged_columns

SIZES = [(3,), (1, 1), (2, 5, 1), (0, 4)]


def batch_of(rng, size, is_one_hot):
    lengths = np.ones(3 * size, int) if is_one_hot else rng.integers(0, 4, 3 * size)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    values = torch.from_numpy(rng.integers(0, 9, lengths.sum()))
    dense = torch.from_numpy(rng.random((size, 2)).astype(np.float32))
    return JaggedBatch(dense, ("a", "b", "c"), values, offsets, torch.zeros(size))


def bags(batch):
    """Ids by sample and feature."""
    ends = batch.offsets.tolist()
    size = batch.batch_size
    return [
        [batch.values[ends[f * size + b] : ends[f * size + b + 1]].tolist() for f in range(3)]
        for b in range(size)
    ]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_one_hot", [True, False])
def test_requests_one_behind_the_other(sizes, is_one_hot):
    rng = np.random.default_rng(len(sizes))
    parts = [batch_of(rng, size, is_one_hot) for size in sizes]
    merged = merged_batches(parts)
    assert bags(merged) == [bag for part in parts for bag in bags(part)]
    assert (
        torch.equal(merged.dense, torch.cat([part.dense for part in parts]))
        and merged.keys == parts[0].keys
    )


def test_columns_one_behind_the_other():
    assert merged_columns([{"a": [1], "b": [2]}, {"a": [3, 4], "b": [5, 6]}]) == {
        "a": [1, 3, 4],
        "b": [2, 5, 6],
    }


def test_merged_requests_score_as_alone(clicks):
    predictor = pb.Predictor.open(clicks.run)
    parts = [predictor.encode(clicks.rows[i : i + 3]) for i in range(0, 30, 3)]
    alone = torch.cat([predictor(part) for part in parts])
    assert (predictor(merged_batches(parts)) - alone).abs().max() < 1e-6
