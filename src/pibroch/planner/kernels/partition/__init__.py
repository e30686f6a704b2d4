"""Cut the rows of tables into partitions of bounded accesses and bounded size."""

from pibroch.planner.kernels.partition.numba import assign, count_counts, cut

__all__ = ["assign", "count_counts", "cut"]
