import numpy as np
import pytest

from pibroch.data.order import EpochOrder


@pytest.mark.parametrize("num_samples", [0, 1, 7, 64, 1000, 1023])
def test_an_epoch_holds_each_sample_once(num_samples):
    order = EpochOrder(num_samples, seed=3, epoch=1, block_samples=16, group_blocks=4)
    assert sorted(order.take(0, num_samples).tolist()) == list(range(num_samples))


def test_the_order_does_not_depend_on_how_it_is_taken():
    def fresh() -> EpochOrder:
        return EpochOrder(1000, seed=3, epoch=1, block_samples=16, group_blocks=4)

    whole = fresh().take(0, 1000)
    order = fresh()
    parts = [order.take(start, min(start + 130, 1000)) for start in range(0, 1000, 130)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(fresh().take(555, 777), whole[555:777])


def test_seed_and_epoch_change_the_order():
    orders = [
        EpochOrder(500, seed, epoch).take(0, 500).tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == EpochOrder(500, 0, 0).take(0, 500).tolist()


def test_small_datasets_are_shuffled_in_full():
    places = EpochOrder(10_000, 0, 0).take(0, 10_000)
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.05
    assert (np.abs(np.diff(places)) == 1).mean() < 0.01


def test_large_datasets_are_read_in_blocks():
    order = EpochOrder(100_000, 0, 0, block_samples=100, group_blocks=10)
    first_group = order.take(0, 1000)
    assert len(np.unique(first_group // 100)) == 10
    assert first_group.max() - first_group.min() > 20_000
