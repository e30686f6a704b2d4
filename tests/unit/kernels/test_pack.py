"""Rows into messages and out of them."""

import numpy as np
import pytest

from pibroch.kernels.pack import naive, numba


@pytest.mark.parametrize(("dim", "width"), [(1, 1), (4, 5), (16, 48)])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packs_as_naive_and_unpacks_what_was_packed(dim, width, num_ranks, dtype):
    rng = np.random.default_rng(dim + num_ranks)
    records = rng.random((200, width), dtype=np.float32)
    seen = (
        (lambda numbers: numbers)
        if dtype == "float32"
        else (lambda numbers: numbers.view(np.uint16))
    )
    counts = rng.integers(0, 7, (2, num_ranks))
    chosen = rng.permutation(200)
    whole = chosen[: counts[0].sum()]
    borrowed = chosen[100 : 100 + counts[1].sum()]
    size = int(np.array([width, dim]) @ counts.sum(1))
    out = np.empty(size, np.float32)
    right = np.empty(size, np.float32)
    numba.pack(records, seen(records), whole, borrowed, counts, dim, out)
    naive.pack(records, seen(records), whole, borrowed, counts, dim, right)
    assert np.array_equal(out, right)
    target = np.zeros_like(records)
    expected = np.zeros_like(records)
    numba.unpack(out, whole, borrowed, counts, dim, target, seen(target))
    naive.unpack(out, whole, borrowed, counts, dim, expected, seen(expected))
    assert np.array_equal(target, expected)
    assert np.array_equal(target[whole], records[whole])
    assert np.array_equal(seen(target)[borrowed, :dim], seen(records)[borrowed, :dim])
    assert np.count_nonzero(target.any(1)) <= len(whole) + len(borrowed)
