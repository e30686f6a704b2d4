"""Homes of single rows."""

from pibroch.planner.kernels.row_map.numba import check_numbers, number_rows, rows_at

__all__ = ["check_numbers", "number_rows", "rows_at"]
