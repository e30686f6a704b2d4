import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pibroch.data.transform import NUM_LOG_BIN_ROWS, log_bin_rows, transform_dense

ANY_FLOATS = hnp.arrays(np.float64, st.integers(0, 20), elements=st.floats(width=64))


@given(ANY_FLOATS, st.sampled_from(["log", "identity"]))
def test_dense_is_finite_for_every_input(values, transform):
    result = transform_dense(values, transform)
    assert result.dtype == np.float32
    assert np.isfinite(result).all()


@given(ANY_FLOATS)
def test_a_value_does_not_depend_on_its_neighbours(values):
    alone = np.array(
        [transform_dense(values[i : i + 1])[0] for i in range(len(values))], np.float32
    )
    np.testing.assert_array_equal(alone, transform_dense(values))


def test_dense_log_keeps_order_and_sign():
    values = np.array([-1e300, -3.0, -0.5, 0.0, 0.5, 3.0, 1e300])
    result = transform_dense(values)
    assert (np.diff(result) > 0).all()
    np.testing.assert_array_equal(result, -result[::-1])
    assert transform_dense(np.array([np.nan]))[0] == 0


@given(ANY_FLOATS)
def test_bins_stay_inside_their_table(values):
    rows = log_bin_rows(values)
    assert ((rows >= 1) & (rows < NUM_LOG_BIN_ROWS)).all()
    np.testing.assert_array_equal(rows == 1, np.isnan(values))


def test_bins_rise_with_the_value_and_part_small_counts():
    values = np.concatenate([np.arange(-4, 1000), 10.0 ** np.arange(3, 30)])
    rows = log_bin_rows(values)
    assert (np.diff(rows) >= 0).all()
    assert len(set(log_bin_rows(np.array([np.nan, -3, -2, -1, 0, 1, 2, 3, 5])).tolist())) == 9
    assert log_bin_rows(np.array([50.0]))[0] == 2 + 3 + 2 + int(np.log(50) ** 2)
