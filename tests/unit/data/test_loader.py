import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from pibroch.data.batch import LoaderPosition
from pibroch.data.dataset import Bags, Split
from pibroch.data.loader import Loader
from pibroch.errors import CheckpointError, ConfigError


def make_split(
    num_samples: int, num_one_hot: int = 3, num_dense: int = 2, multi_hot: bool = False
) -> Split:
    """Sample i has label i % 2, dense i + column / 10, ids 10 i + column, i % 4 ids 1000 + i."""
    numbers = np.arange(num_samples)
    keys = tuple(f"k{i}" for i in range(num_one_hot))
    bags = {}
    if multi_hot:
        offsets = np.concatenate([[0], np.cumsum(numbers % 4)]).astype(np.int64)
        bags = {"bag": Bags(np.repeat(1000 + numbers, numbers % 4).astype(np.int32), offsets)}
        keys = (keys[0], "bag", *keys[1:])
    return Split(
        "train",
        keys,
        tuple(f"d{i}" for i in range(num_dense)),
        (numbers % 2).astype(np.uint8),
        (numbers[:, None] + np.arange(num_dense) / 10).astype(np.float32),
        (10 * numbers[:, None] + np.arange(num_one_hot)).astype(np.int32),
        bags,
    )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [0, 1, 10, 11])
def test_weights_in_the_data_are_those_of_each_batchs_samples(size, shuffle):
    weights = np.arange(size, dtype=np.float32) ** 2
    split = replace(make_split(size), sample_weights=weights)
    for part in ((0, 1), (1, 3)):
        loader = Loader(split, 4, shuffle=shuffle, part=part)
        for _ in range(2):  # epochs
            pairs = list(zip(loader.weights_in_data(), loader, strict=True))
            assert len(pairs) == -(-size // 4)
            for got, batch in pairs:
                assert got.tolist() == weights[samples_of(batch)].tolist()
    assert list(Loader(make_split(3), 2).weights_in_data()) == [None, None]


def samples_of(batch) -> list[int]:
    return (batch.values[: batch.batch_size] // 10).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_dense", [0, 2])
def test_batches_hold_whole_samples(shuffle, num_dense):
    split = make_split(103, num_dense=num_dense)
    loader = Loader(split, 16, shuffle=shuffle, seed=5)
    batches = list(loader)
    assert len(batches) == len(loader) == 7
    assert [batch.batch_size for batch in batches] == [16] * 6 + [7]
    seen = []
    for batch in batches:
        batch.validate()
        samples = torch.tensor(samples_of(batch))
        seen += samples.tolist()
        assert batch.dense.shape == (batch.batch_size, num_dense)
        torch.testing.assert_close(batch.labels, (samples % 2).float())
        torch.testing.assert_close(
            batch.values.view(3, -1), 10 * samples + torch.arange(3)[:, None]
        )
        if num_dense:
            torch.testing.assert_close(batch.dense, samples[:, None] + torch.tensor([0.0, 0.1]))
    assert sorted(seen) == list(range(103))
    assert (seen == list(range(103))) != shuffle


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_id_and_bags_mix(shuffle):
    loader = Loader(make_split(50, multi_hot=True), 8, shuffle=shuffle)
    for batch in loader:
        batch.validate()
        samples = samples_of(batch)
        assert batch.keys == ("k0", "bag", "k1", "k2")
        lengths = batch.lengths().view(4, -1)
        assert lengths[1].tolist() == [sample % 4 for sample in samples]
        assert (lengths[[0, 2, 3]] == 1).all()
        for f, expected in enumerate(
            (lambda i: [10 * i], lambda i: [1000 + i] * (i % 4), lambda i: [10 * i + 1])
        ):
            for b, sample in enumerate(samples):
                start, end = batch.offsets[f * len(samples) + b : f * len(samples) + b + 2]
                assert batch.values[start:end].tolist() == expected(sample)


def test_only_bags():
    split = make_split(9, num_one_hot=1, multi_hot=True)
    only = Split(
        split.name, ("bag",), (), split.labels, split.dense[:, :0], split.ids[:, :0], split.bags
    )
    (batch,) = Loader(only, 100)
    batch.validate()
    assert batch.values.tolist() == split.bags["bag"].values.tolist()


def test_order_depends_on_seed_and_epoch_alone():
    def epochs(seed: int, batch_size: int) -> list[list[int]]:
        loader = Loader(make_split(60), batch_size, shuffle=True, seed=seed)
        return [[i for batch in loader for i in samples_of(batch)] for _ in range(2)]

    assert epochs(1, 7) == epochs(1, 60)
    assert epochs(1, 7)[0] != epochs(1, 7)[1]
    assert epochs(1, 7) != epochs(2, 7)


@pytest.mark.parametrize("shuffle", [False, True])
def test_any_position_goes_on_with_the_rest(shuffle):
    split = make_split(53)
    undisturbed = Loader(split, 10, shuffle=shuffle, seed=3)
    batches = [*undisturbed, *undisturbed]
    reader = Loader(split, 10, shuffle=shuffle, seed=3)
    for consumed, batch in enumerate(batches[:9]):
        resumed = Loader(split, 10, shuffle=shuffle, seed=3)
        resumed.load_state_dict(reader.state_at(batch.position))
        rest = [*resumed, *resumed][: len(batches) - consumed - 1]
        assert [samples_of(b) for b in rest] == [samples_of(b) for b in batches[consumed + 1 :]]


def test_positions_and_state():
    loader = Loader(make_split(25), 10, shuffle=True, seed=3)
    positions = [batch.position for batch in loader]
    assert positions == [LoaderPosition(0, 10), LoaderPosition(0, 20), LoaderPosition(1, 0)]
    assert loader.position == positions[-1]
    next(iter(loader))
    assert loader.state_dict() | {} == {
        "epoch": 1,
        "sample": 10,
        "seed": 3,
        "shuffle": True,
        "num_samples": 25,
    }


@pytest.mark.parametrize("change", [{"seed": 4}, {"shuffle": False}, {"num_samples": 26}])
def test_the_state_of_another_order_is_refused(change):
    loader = Loader(make_split(25), 10, shuffle=True, seed=3)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        loader.load_state_dict(loader.state_dict() | change)


def test_an_empty_split_has_no_batches():
    loader = Loader(make_split(0), 10, shuffle=True)
    assert len(loader) == 0
    assert list(loader) == list(loader) == []


def test_batch_size_zero_is_refused():
    with pytest.raises(ConfigError, match="batch size 0"):
        Loader(make_split(5), 0)


def test_a_million_criteo_samples_a_second_on_one_core():
    rng = np.random.default_rng(0)
    size = 300_000
    split = Split(
        "train",
        tuple(f"k{i}" for i in range(39)),
        tuple(f"d{i}" for i in range(13)),
        np.zeros(size, np.uint8),
        np.zeros((size, 13), np.float32),
        rng.integers(0, 1000, (size, 39), dtype=np.int32),
        {},
    )
    loader = Loader(split, 2048, shuffle=True)
    next(iter(loader))
    seconds = []
    for _ in range(10):  # threads of other tests use this process's time now and then
        started = time.process_time()
        count = sum(batch.batch_size for batch in loader)
        seconds.append((time.process_time() - started) / count)
        if seconds[-1] < 1e-6:
            return
    raise AssertionError(f"{seconds} s of CPU a sample, need one below 1e-6")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_each_global_batch_in_rank_order(size):
    split = make_split(23, multi_hot=True)
    whole = Loader(split, 5, shuffle=True, seed=4)
    parts = [Loader(split, 5, shuffle=True, seed=4, part=(rank, size)) for rank in range(size)]
    for _ in range(2):  # epochs
        for together, *pieces in zip(whole, *parts, strict=True):
            assert [piece.batch_size for piece in pieces] == [
                together.batch_size * (rank + 1) // size - together.batch_size * rank // size
                for rank in range(size)
            ]
            assert [piece.first_sample for piece in pieces] == [
                together.batch_size * rank // size for rank in range(size)
            ]
            assert {piece.position for piece in pieces} == {together.position}
            torch.testing.assert_close(torch.cat([piece.dense for piece in pieces]), together.dense)
            for key in split.keys:
                bags = torch.cat([piece.select((key,)).values for piece in pieces])
                torch.testing.assert_close(bags, together.select((key,)).values)
            for piece in pieces:
                piece.validate()
    assert {str(part.state_dict()) for part in parts} == {str(whole.state_dict())}


def test_a_rank_outside_its_world():
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Loader(make_split(3), 2, part=(2, 2))
