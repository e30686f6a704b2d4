"""How rows lie in memory."""

import numpy as np
import pytest

from pibroch.kernels.memory import FLOATS_PER_LINE, empty_rows


@pytest.mark.parametrize("width", [1, 16, 17, 32, 260])
@pytest.mark.parametrize("num_rows", [1, 1000])
def test_rows_begin_with_a_line(num_rows, width):
    rows = empty_rows(num_rows, width)
    assert rows.shape == (num_rows, width) and rows.dtype == np.float32 and rows.flags.c_contiguous
    assert rows.ctypes.data % (FLOATS_PER_LINE * rows.itemsize) == 0
    rows[:] = 1.0


def test_no_rows():
    assert empty_rows(0, 16).shape == (0, 16)
