"""Copied rows that travel as lists or as bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pibroch.exchange.alltoall.row_bits import RowSeries


@given(st.integers(0, 300), st.integers(1, 5), st.data())
@pytest.mark.parametrize("id_type", [np.int32, np.int64])
def test_the_same_rows_come_out(id_type, num_rows, step, data):
    series = RowSeries(data.draw(st.integers(0, step - 1)), step, num_rows)
    chosen = (
        data.draw(st.lists(st.sampled_from(series.rows), unique=True)) if len(series.rows) else []
    )
    rows = np.array(sorted(chosen), np.int64)
    numbers, length = series.packed(rows, id_type)
    assert numbers.dtype == id_type and len(numbers) == abs(length) <= max(len(rows), 0)
    out = series.unpacked(numbers, length)
    assert out.dtype == np.int64 and out.tolist() == rows.tolist()
    bits = series.bits(rows, id_type)
    assert len(bits) == series.num_words(id_type) and series.of_bits(bits).tolist() == rows.tolist()


def test_the_shorter_form_travels():
    series = RowSeries(1, 2, 2_000)
    few = np.array([1, 3, 1999])
    many = np.arange(1, 2_000, 2)
    assert [series.packed(rows, np.int32)[1] for rows in (few, many)] == [3, -32]
    assert series.packed(few[:0], np.int32)[1] == 0
