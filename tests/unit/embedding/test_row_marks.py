"""Marks of a shard's rows by name: each has its own, and a cut that was not saved comes back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.embedding import MemoryShard, RowWiseAdagrad, Table

ROWS = 12
SPARE = 3
TABLES = [Table("a", ROWS - 5, 2), Table("b", 5, 2)]
NAMES = "xyz"


def shard_of():
    shard = MemoryShard.whole(TABLES, RowWiseAdagrad(lr=0.1), 1)
    for name in NAMES:
        shard.start_marks(name)
    return shard


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sets(st.integers(0, ROWS - 1)),
            st.tuples(st.sampled_from(NAMES), st.sampled_from(["cut", "saved", "lost", "all"])),
        ),
        max_size=30,
    )
)
def test_every_name_has_the_rows_since_its_own_last_cut(events):
    shard = shard_of()
    marked = {name: set() for name in NAMES}
    cuts = {name: set() for name in NAMES}
    for event in events:
        if isinstance(event, set):
            shard.mark(np.array(sorted(event), np.int64))
            for each in marked.values():
                each |= event
            continue
        name, what = event
        if what == "cut" and not cuts[name]:
            copy = shard.cut(name, with_state=name != "z")
            ids = [
                7 * (view.piece.table.name == "b") + np.array(view.piece.rows)
                for view in copy.views()
            ]
            cuts[name] = marked[name]
            marked[name] = set()
            assert set(np.concatenate(ids).tolist()) == cuts[name]
            records = shard.records[sorted(cuts[name])]
            assert np.array_equal(copy.records, records if name != "z" else records[:, :2])
            assert all((view.state == {}) == (name == "z") for view in copy.views())
        elif what in ("saved", "lost"):
            shard.end_cut(name, is_saved=what == "saved")
            marked[name] |= cuts[name] if what == "lost" else set()
            cuts[name] = set()
        elif what == "all":
            shard.mark_all(name)
            marked[name] = set(range(ROWS))
    assert {name: set(shard.marks.rows(name).tolist()) for name in NAMES} == marked
    assert {name: set(shard.marks.unsaved(name).tolist()) for name in NAMES} == cuts


def test_room_behind_the_rows_may_be_marked_and_is_in_no_cut():
    shard = MemoryShard(
        MemoryShard.whole(TABLES, RowWiseAdagrad(lr=0.1), 1).pieces,
        2,
        RowWiseAdagrad(lr=0.1),
        1,
        spare_rows=SPARE,
    )
    shard.start_marks("x")
    shard.mark(np.array([3, ROWS + SPARE - 1]))
    assert shard.marks.rows("x").tolist() == [3]
    shard.mark_all("x")
    assert len(shard.cut("x").records) == ROWS


def test_without_memory_for_a_copy_marks_stay(monkeypatch):
    monkeypatch.setattr("pibroch.embedding.shard.free_memory", lambda: 3 * 3 * 4)
    shard = shard_of()
    shard.mark(np.array([2, 5]))
    assert shard.cut("x") is None
    assert shard.marks.rows("x").tolist() == [2, 5] and not len(shard.marks.unsaved("x"))


def test_a_name_that_nobody_started_is_no_name():
    with pytest.raises(KeyError):
        shard_of().cut("w")
