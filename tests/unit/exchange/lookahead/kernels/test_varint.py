"""Rising numbers in few bytes."""

import numpy as np
import pytest

from pibroch.exchange.lookahead.oracle.kernels.varint import naive, numba

CASES = [
    [], [0], [127], [128], [0, 0, 5], [3, 1 << 20, (1 << 62) + 1], list(range(0, 70_000, 7)),
    [(1 << 64) - 1], [1, 1 << 63],
]  # fmt: skip


def encoded(numbers):
    out = np.empty(numba.MAX_BYTES * len(numbers), np.uint8)
    return out[: numba.encode(np.array(numbers, np.uint64), out)]


@pytest.mark.parametrize("numbers", CASES, ids=lambda numbers: str(len(numbers)))
def test_encodes_as_naive_and_decodes_what_was_encoded(numbers):
    message = encoded(numbers)
    assert message.tobytes() == naive.encode(numbers)
    decoded = np.empty(len(numbers), np.uint64)
    assert numba.decode(message, decoded) == len(message)
    assert decoded.tolist() == numbers == naive.decode(message.tobytes())
    if numbers and numbers[-1] < 1 << 63:
        out = np.empty_like(message)
        assert numba.encode(np.array(numbers), out) == len(out) and np.array_equal(out, message)
        assert numba.decode(message, decoded.view(np.int64)) == len(message)


def test_distinct_rows_of_a_batch_take_two_bytes_at_most():
    rows = np.unique(np.random.default_rng(0).integers(0, 2_600_000, 26_000))
    assert len(encoded(rows)) < 2 * len(rows)


def test_bytes_that_end_too_early_or_never_are_refused():
    decoded = np.empty(3, np.int64)
    assert numba.decode(encoded([1, 2]), decoded) == -1
    assert numba.decode(np.full(40, 255, np.uint8), decoded) == -1
    assert numba.decode(np.array([1, 128], np.uint8), decoded) == -1


def test_negative_numbers_come_before_the_others():
    numbers = np.array([-(1 << 63), -5, -1, 0, 3, (1 << 63) - 1])
    out = np.empty(60, np.uint8)
    num_bytes = numba.encode(numbers.view(np.uint64), out)
    decoded = np.empty(6, np.int64)
    assert numba.decode(out[:num_bytes], decoded.view(np.uint64)) == num_bytes
    assert decoded.tolist() == numbers.tolist()
