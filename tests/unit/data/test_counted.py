import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.data import counted
from pibroch.data.counted import Counted, RowCounts, all_counts
from pibroch.data.dataset import EncodedDataset
from pibroch.data.prepare import PrepareOptions, prepare
from pibroch.data.schema import Schema
from pibroch.data.sources import TextSource
from pibroch.data.splits import SplitRule
from pibroch.errors import DataError

NUM_ROWS = 5_000_000


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_rows=st.sampled_from([1, 20, 3000]),
    dense_rows=st.sampled_from([0, 20]),
    sizes=st.lists(st.integers(0, 40), max_size=12),
)
def test_rows_are_counted_as_in_one_array(seed, num_rows, dense_rows, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "DENSE_ROWS", dense_rows)
        patch.setattr(counted, "_FEW_IDS", 10)
        rng = np.random.default_rng(seed)
        counts = RowCounts(num_rows)
        parts = [rng.integers(0, num_rows, size).astype(np.int32) for size in sizes]
        for part in parts:
            counts.add(part)
        accessed = counts.accessed()
    expected = np.bincount(np.concatenate([np.empty(0, np.int64), *parts]), minlength=num_rows)
    assert accessed.values.tolist() == np.flatnonzero(expected).tolist()
    assert accessed.counts.tolist() == expected[expected > 0].tolist()
    assert all_counts(accessed, num_rows).tolist() == expected.tolist()


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> EncodedDataset:
    """A dataset of 60 samples whose table has five million buckets."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "log.csv").write_text("y,u\n" + "".join(f"{n % 2},u{n % 20}\n" for n in range(60)))
    schema = Schema.from_toml(
        f'label = "y"\n[categorical.u]\nencoding = "hash"\nnum_buckets = {NUM_ROWS}\n'
    )
    sources = [TextSource(folder / "log.csv", ",", True)]
    options = PrepareOptions(split=SplitRule.parse("none"))
    prepare(sources, schema, folder / "data", options)
    return EncodedDataset.open(folder / "data")


def test_counts_of_a_hashed_table_take_disk_by_the_rows_that_are_read(wide):
    wide.verify()
    assert sum(path.stat().st_size for path in wide.path.rglob("*")) < 100_000
    rows, counts = wide.accesses("u")
    assert len(rows) == 20 and set(counts.tolist()) == {3}
    assert set(rows.tolist()) == set(wide.split("train").ids[:, 0].tolist())
    all_rows = wide.access_counts("u")
    assert len(all_rows) == NUM_ROWS + 2 and all_rows.sum() == 60


@pytest.mark.parametrize("rows", [[-1, 5], [5, 5], [5, NUM_ROWS + 2]])
def test_rows_of_another_table_are_refused(wide, monkeypatch, rows):
    whole = EncodedDataset._map

    def mapped(self, name, dtype, shape, files=None):
        if name.endswith("u.rows.i64"):
            return np.array(rows)
        return whole(self, name, dtype, shape, files)

    monkeypatch.setattr(EncodedDataset, "_map", mapped)
    with pytest.raises(DataError, match=r"u\.rows\.i64"):
        wide.accesses("u")


def test_parts_are_merged():
    parts = [Counted(np.array([2, 9]), np.array([1, 5])), Counted(np.array([2]), np.array([3]))]
    values, counts = counted.merged(parts, min_count=5)
    assert values.tolist() == [9] and counts.tolist() == [5]
