"""Sets of ranks as bits: one word for a set while few ranks take part, several for more.

Masks ``[K, n]`` are n sets in K words; bit b of word k says whether rank ``BITS * k + b`` is in.
Kernels take the words' numbers as a tuple, whose length is a constant to the compiler: with one
word, loops over words leave no trace. Of very many words they are an array, of any length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.bits import lowest
from pibroch.kernels.policy import kernel

BITS = 62
"""Ranks in a word: few enough for words, and ``1 << BITS``, to be positive as int64."""
MOST_CONSTANT_WORDS = 16
MAX_RANKS = (1 << 15) - 1
"""As many as the type of a rank's number takes."""

Words = tuple[int, ...] | Ints


def words_for(num_ranks: int) -> Words:
    """The words' numbers in masks of ``num_ranks`` ranks.

    There are few different lengths of tuples, since code is compiled for each.

    Example:
        >>> words_for(62), words_for(63), len(words_for(8192))
        ((0,), (0, 1), 133)
    """
    num_words = -(-num_ranks // BITS)
    if num_words > MOST_CONSTANT_WORDS:
        return np.arange(num_words)
    return tuple(range(1 << (num_words - 1).bit_length()))


def mask_type(num_ranks: int) -> np.dtype[Any]:
    """The smallest type for the words of masks of ``num_ranks`` ranks."""
    return np.dtype(np.uint8 if num_ranks <= 8 else np.uint16 if num_ranks <= 16 else np.int64)


def rank_type(num_ranks: int) -> np.dtype[Any]:
    """The smallest type for the number of a rank, or ``HOME`` in its place."""
    return np.dtype(np.int8 if num_ranks <= 128 else np.int16)


@kernel
def bit_in(words: Words, word: int, rank: int) -> np.int64:
    """The bit of a rank in a word, 0 where it is in another."""
    if len(words) == 1:
        return np.int64(1) << np.int64(rank)
    place = rank - BITS * word
    return np.int64(1) << np.int64(place) if 0 <= place < BITS else np.int64(0)


@kernel
def word_of(words: Words, rank: int) -> int:
    """The word in which a rank is."""
    return 0 if len(words) == 1 else rank // BITS


@kernel
def is_in(words: Words, masks: Array, at: int, rank: int) -> bool:
    """Whether a rank is in a set."""
    if len(words) == 1:
        return bool((np.int64(masks[0, at]) >> np.int64(rank)) & 1)
    word = word_of(words, rank)
    return bool(np.int64(masks[word, at]) & bit_in(words, word, rank))


@kernel
def first_bits(words: Words, word: int, num_ranks: int) -> np.int64:
    """The bits of the first ranks in a word."""
    return (np.int64(1) << np.int64(min(max(num_ranks - BITS * word, 0), BITS))) - 1


@kernel
def lowest_in(words: Words, masks: Array, at: int) -> int:
    """The lowest rank in a set, which is not empty."""
    rank = lowest(np.int64(masks[0, at]))
    for word in range(1, len(words)):
        rank = rank if rank < BITS * word else BITS * word + lowest(np.int64(masks[word, at]))
    return rank


@kernel
def add_bits(masks: Array, first_rank: int, amount: int, totals: Ints) -> None:
    """Add ``amount`` to ``totals`` ``[P]`` for each rank in each of the masks ``[n]`` of a word."""
    num_ranks = min(BITS, len(totals) - first_rank)
    if masks.itemsize < 8:
        # few ranks: one pass over the masks for each, in which an instruction takes many masks
        for rank in range(num_ranks):
            count = 0
            for i in range(len(masks)):
                count += (masks[i] >> rank) & 1
            totals[rank] += amount * count
        return
    for i in range(len(masks)):
        rest = np.int64(masks[i])
        while rest:
            totals[first_rank + lowest(rest)] += amount
            rest &= rest - 1
