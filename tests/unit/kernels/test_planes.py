"""Numbers as planes of bytes."""

import numpy as np
import pytest

from pibroch.kernels.planes import naive, numba


@pytest.mark.parametrize("length", [0, 1, 7, 300])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_split_as_naive_does_and_join_again(dtype, length):
    numbers = np.random.default_rng(length).integers(
        0, np.iinfo(dtype).max, length, dtype, endpoint=True
    )
    rooms = [
        (np.zeros((numbers.itemsize - 1, length), np.uint8), np.zeros(length, np.uint8))
        for _ in range(2)
    ]
    for kernels, (low, top) in zip((numba, naive), rooms, strict=True):
        kernels.split(numbers, low, top)
    assert np.array_equal(rooms[0][0], rooms[1][0])
    assert np.array_equal(rooms[0][1], rooms[1][1])
    for kernels in (numba, naive):
        joined = np.zeros_like(numbers)
        kernels.join(*rooms[0], joined)
        assert np.array_equal(joined, numbers)
