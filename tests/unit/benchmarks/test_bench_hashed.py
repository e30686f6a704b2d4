"""The benchmark of hashed tables measures indices that agree."""

import numpy as np
import pytest
from benchmarks.topics import hashed

from pibroch.embedding import Hashed
from pibroch.errors import PibrochError


def test_the_dictionary_and_ours_have_the_same_rows():
    assert "the same rows" in hashed.agreement()


def test_other_rows_are_noticed(monkeypatch):
    class Forgetful(hashed.DictionaryIndex):
        def _evict(self, num):
            return super()._evict(num)[1:]

    monkeypatch.setattr(hashed, "DictionaryIndex", Forgetful)
    with pytest.raises(PibrochError, match="other rows than the dictionary's in step 4"):
        hashed.agreement()


def test_batches_are_what_the_page_says():
    stream = hashed.Stream(3)
    first, second = stream.batch(), stream.batch()
    distinct, counts = np.unique(first, return_counts=True)
    assert len(first) == hashed.BATCH_IDS
    assert len(distinct) == hashed.HOT_IDS + hashed.NEW_IDS
    assert np.count_nonzero(counts == 1) >= hashed.NEW_IDS
    both = np.intersect1d(first, second)
    assert 0.4 * hashed.HOT_IDS < len(both) < 0.6 * hashed.HOT_IDS


def test_lengths_of_searches():
    index = Hashed().index(1000)
    index.learn(np.arange(1000))
    assert 1 <= hashed.longest_of(index, 0.5) <= hashed.longest_of(index, 1.0) < 50
