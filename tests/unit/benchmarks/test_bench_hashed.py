"""The benchmark of hashed tables measures indices that agree."""

import numpy as np
import pytest
from benchmarks import hashed_drift
from benchmarks.topics import hashed

from pibroch.data.synthetic import Generator, SyntheticOptions
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
    assert 1 <= index.longest_search(0.5) <= index.longest_search(1.0) < 50


def test_rows_of_bounded_tables_are_the_share_that_the_page_says():
    seen = {"small": 1_000, "large": 30_000, "larger": 69_000}
    rows = hashed_drift.bounded(seen)
    assert rows["small"] == 1_000
    assert sum(rows.values()) == pytest.approx(20_000, abs=3)
    assert rows["larger"] / rows["large"] == pytest.approx(2.3, abs=0.01)


def test_contenders_of_drift_see_the_same_samples_in_the_order_of_time(monkeypatch):
    monkeypatch.setattr(hashed_drift, "TEST_SAMPLES", 512)
    options = SyntheticOptions(2_000, max_table_rows=3_000, raw=True, drift=0.1, drift_every=256)
    stream = hashed_drift.Stream(Generator(options), 4)
    batches = list(stream.batches(0, 1_024))
    assert [len(batch.labels) for batch in batches] == [256] * 4
    seen = stream.distinct_ids()
    values = np.stack([batch.values.numpy().reshape(26, -1) for batch in batches])
    assert list(seen.values()) == [len(np.unique(values[:, table])) for table in range(26)]
    for contender in hashed_drift.CONTENDERS:
        middle, end = hashed_drift.measured(stream, contender, seen)
        assert (middle["steps"], end["steps"]) == (2, 4) and 0 < end["auc"] < 1
        assert end["rows"] == sum(seen.values()) and not end.get("evictions")
