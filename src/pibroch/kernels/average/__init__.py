"""Exponential moving averages of rows, kept up lazily.

A record holds its average, ``[D]`` from column ``first`` on, and the step at which it was taken.
"""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.average import numba
from pibroch.kernels.operation import Operation

__all__ = ["advance", "averaged_rows"]


@Operation
def advance(records: Records, rows: Ints, dim: int, first: int, decay: float, step: int) -> None:
    """Bring the averages of distinct ``rows`` to ``step``, by the weights as they stand.

    Called for ``step - 1`` before the weights change and for ``step`` after: the first catches up,
    the second blends in.
    """
    parallel.run(numba.advance, len(rows), records, rows, dim, first, decay, step)


@Operation
def averaged_rows(
    records: Records,
    stored: Stored,
    row_ids: Ints,
    first: int,
    decay: float,
    step: int,
    out: Records,
) -> None:
    """Write the averages at ``step`` of ``row_ids`` ``[V]`` to ``out`` ``[V, D]``.

    The records stay as they are; ``stored`` is the same memory in the type of the weights.
    """
    parallel.run(
        numba.averaged_rows, len(row_ids), records, stored, row_ids, first, decay, step, out
    )
