"""The table of addresses against a dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.exchange.lookahead.oracle.kernels.address_table import numba as kernels
from pibroch.exchange.lookahead.oracle.kernels.address_table.naive import NumberOf


def enter(table, addresses):
    """Numbers of addresses, the table having room."""
    numbers = np.full(len(addresses), -1, np.int32)
    kernels.find_or_add(table, np.array(addresses, np.int64), numbers)
    return numbers.tolist()


def larger(table):
    other = kernels.empty_table(2 * len(table.pairs), table.pairs.dtype)
    kernels.copy_into(table, other)
    return other


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_addresses=st.sampled_from([1, 5, 20, 300]),
    scale=st.sampled_from([1, 7, 1 << 16, 1 << 20]),
)
def test_any_program_gives_the_numbers_of_a_dictionary(seed, num_addresses, scale):
    rng = np.random.default_rng(seed)
    addresses = np.arange(num_addresses) * scale
    naive = NumberOf()
    table = kernels.empty_table(4, np.dtype(np.int32))
    for _ in range(30):
        some = rng.choice(addresses, int(rng.integers(0, 2 * num_addresses))).tolist()
        while table.counts[0] + len(some) > len(table.pairs) // 4:
            table = larger(table)
        assert enter(table, some) == naive.find_or_add(some)
        there = np.array(sorted(naive.number))
        leaving = rng.permutation(there)[: int(rng.integers(0, len(there) + 1))]
        kernels.remove(table, leaving)
        naive.remove(leaving.tolist())
        left = sorted(naive.number)
        assert enter(table, left) == [naive.number[address] for address in left]
        assert table.counts[:3].tolist() == [len(left), naive.num_given, len(naive.free)]
        keys = table.pairs[:, 0]
        assert sorted(keys[keys != 0] - 1) == left


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_addresses_that_hash_to_the_last_place_go_on_at_the_first(dtype):
    table = kernels.empty_table(32, np.dtype(dtype))
    multiplier = int(table.counts[3])
    # far apart: some multipliers, which are drawn, put neighbours into few places
    addresses = np.random.default_rng(1).integers(0, 1 << 30, 2000).tolist()
    last = [each for each in addresses if kernels.place_of(each, 5, multiplier) == 31][:6]
    assert enter(table, last) == list(range(6))
    assert enter(table, last[::-1]) == list(range(6))[::-1]
    kernels.remove(table, np.array(last[:1] + last[2:3]))
    assert enter(table, last[1:2] + last[3:]) == [1, 3, 4, 5]
    assert enter(table, [last[0], last[2]]) == [2, 0]  # what was given back last is given first


def test_addresses_beyond_32_bits():
    table = kernels.empty_table(64, np.dtype(np.int64))
    far = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 33) + 5, (1 << 40) - 1]
    assert enter(table, far + far) == 2 * list(range(len(far)))
