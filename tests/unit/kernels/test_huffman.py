"""Bytes of uneven frequency in few bits."""

import numpy as np
import pytest

from pibroch.kernels.huffman import naive, numba

RNG = np.random.default_rng(0)
CASES = {
    "one": np.array([7], np.uint8),
    "all_alike": np.full(3000, 255, np.uint8),
    "two": np.array([0, 255] * 9, np.uint8),
    "exponents": RNG.normal(size=4001).astype(np.float32).view(np.uint8)[3::4].copy(),
    "any": RNG.integers(0, 256, 4003).astype(np.uint8),
    "all_once": np.arange(256, dtype=np.uint8),
    "halving": np.repeat(np.arange(14), 1 << np.arange(14)[::-1]).astype(
        np.uint8
    ),  # Huffman's longest code has 13 bits
    "fibonacci": np.repeat(
        np.arange(16), [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
    ).astype(np.uint8),
}
LIMITED = ("exponents", "halving", "fibonacci")  # the naive form then gives all numbers eight bits


def encoded(numbers):
    out = np.empty(numba.max_bytes(len(numbers)), np.uint8)
    return out[: numba.encode(numbers, out)]


@pytest.mark.parametrize("name", CASES)
def test_what_was_encoded_is_decoded(name):
    numbers = CASES[name]
    message = encoded(numbers)
    decoded = np.empty_like(numbers)
    assert numba.decode(message, decoded) == len(message)
    assert np.array_equal(decoded, numbers)
    assert naive.decode(message.tobytes(), len(numbers)) == numbers.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_reads_what_the_naive_form_writes(name):
    numbers = CASES[name]
    message = np.frombuffer(naive.encode(numbers.tobytes()), np.uint8).copy()
    decoded = np.empty_like(numbers)
    assert numba.decode(message, decoded) == len(message)
    assert np.array_equal(decoded, numbers)
    if name not in LIMITED:
        assert len(encoded(numbers)) == len(message)  # codes as short as any


@pytest.mark.parametrize("name", ["exponents", "halving", "fibonacci", "any"])
def test_codes_take_little_more_than_the_entropy(name):
    counts = np.bincount(CASES[name])
    shares = counts[counts > 0] / counts.sum()
    entropy = -(shares * np.log2(shares)).sum()
    assert 8 * (len(encoded(CASES[name])) - numba.HEADER - 4) / counts.sum() < 1.03 * entropy + 0.1


def test_the_top_byte_of_normal_floats_takes_three_bits():
    numbers = CASES["exponents"]
    assert 8 * (len(encoded(numbers)) - numba.HEADER) < 3.2 * len(numbers)


def test_what_is_no_code_is_refused_or_read_in_bounds():
    good = encoded(CASES["exponents"])
    decoded = np.empty(len(CASES["exponents"]), np.uint8)
    assert numba.decode(good[:-400].copy(), decoded) == -1
    assert numba.decode(good[: numba.HEADER - 4].copy(), decoded) == -1
    assert numba.decode(good[:-1].copy(), decoded) == -1
    assert numba.decode(np.zeros(400, np.uint8), decoded) == -1  # no number has a code
    assert numba.decode(np.full(400, 0x11, np.uint8), decoded) == -1  # 256 codes of one bit
    assert numba.decode(np.full(400, 0xFF, np.uint8), decoded) == -1  # longer than any
    rng = np.random.default_rng(1)
    for _ in range(100):
        spoilt = good.copy()
        spoilt[rng.integers(0, len(spoilt), 3)] = rng.integers(0, 256, 3)
        assert numba.decode(spoilt, decoded) in range(-1, len(spoilt) + 1)
