"""How much of batches is under way to a trainer.

Processors in this process answer when they are waited for.
"""

import numpy as np
import pytest
import torch

from pibroch import rpc
from pibroch.collectives import Ranks
from pibroch.data import EncodedDataset, Loader
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.processors import Processors, client, processor
from pibroch.processors.source import num_bytes

NAMES = ("processor0", "processor1")
BATCH_SIZE = 500


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "made"
    synthesize(SyntheticOptions(num_samples=10_000, max_table_rows=40), folder)
    return EncodedDataset.open(folder)


class Answers:
    """In place of the network: what was asked for and not taken yet, in bytes."""

    def __init__(self):
        self.under_way = 0
        self.most_bytes = 0
        self.most = 0

    def ask(self, name, function, arguments, timeout):
        plain = function(*arguments)
        self.under_way += num_bytes(plain)
        self.most_bytes = max(self.most_bytes, self.under_way)
        answer = torch.futures.Future()
        answer.set_result(plain)
        return _Answer(self, answer)


class _Answer:
    def __init__(self, answers, answer):
        self._answers = answers
        self._answer = answer

    def wait(self):
        plain = self._answer.wait()
        self._answers.under_way -= num_bytes(plain)
        return plain


@pytest.mark.parametrize("num_batches_allowed", [0, 1, 3, 5, 100])
def test_batches_under_way_are_bounded_in_bytes_and_in_number(
    dataset, monkeypatch, num_batches_allowed
):
    loader = Loader(dataset.split("train"), BATCH_SIZE)
    one = num_bytes(
        processor.batch(
            [str(dataset.path), dataset.digest, "train", BATCH_SIZE, False, 0, 0, 1], 0, 0
        )
    )
    answers = Answers()
    monkeypatch.setattr(rpc, "rpc_async", answers.ask)
    monkeypatch.setattr(client, "MOST_BYTES", num_batches_allowed * one + one // 2)
    batches = list(Processors(NAMES, Ranks.alone()).batches(dataset, loader, 30))
    assert len(batches) == 30 and np.isfinite(batches[-1].dense.numpy()).all()
    in_number = client.MOST_PER_PROCESSOR * len(NAMES)
    assert answers.most_bytes <= one * max(len(NAMES), min(num_batches_allowed, in_number))
    assert answers.most_bytes >= one * len(NAMES)
