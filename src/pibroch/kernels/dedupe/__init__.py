"""Group equal row ids, so that each row is updated once. V ids, U distinct ones."""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.dedupe import numba
from pibroch.kernels.operation import Operation

__all__ = ["dedupe", "sample_major_sequence"]

sample_major_sequence = Operation(numba.sample_major_sequence)


@Operation
def dedupe(
    row_ids: Ints, sequence: Array, bounds: list[int], rows: Ints, segments: Array, order: Array
) -> list[int]:
    """Group the positions of equal ids, each of some ranges of the sequence by itself.

    Args:
        row_ids: ``[V]``.
        sequence: int32 ``[V]``, the positions in the order in which they are to be kept.
        bounds: of the ranges, one a thread, which may share no id.
        rows: ``[V]``, receives each range's distinct ids, rising, from where it begins.
        segments: int32 ``[V]``, receives likewise where each one's positions begin in ``order``.
        order: int32 ``[V]``, receives the positions grouped by row.

    Returns:
        The number of distinct ids in each range.
    """
    return parallel.run_ranges(numba.dedupe, bounds, row_ids, sequence, rows, segments, order)
