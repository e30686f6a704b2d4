"""What rows and gradients need on their way between ranks.

V ids in a batch, U distinct rows, D weights in a row, W floats in a record.
"""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Array, Ints, Records, Stored
from pibroch.kernels.operation import Operation
from pibroch.kernels.route import numba
from pibroch.kernels.route.numba import Homes
from pibroch.kernels.scatter_update.numba import Grouped

__all__ = ["Homes", "gather_rows", "places", "resolve_addresses", "scatter_rows"]

resolve_addresses = Operation(numba.resolve_addresses)


@Operation
def places(out: Array, grouped: Grouped) -> None:
    """Write the number of each position's row among the distinct ones to ``out`` ``[V]``."""
    parallel.run(numba.places, len(grouped.rows), grouped, out)


@Operation
def gather_rows(records: Stored, rows: Ints, out: Records) -> None:
    """Copy the weights of ``rows`` ``[U]`` to ``out`` ``[U, D]``, as float32."""
    parallel.run(numba.gather_rows, len(rows), records, rows, out)


@Operation
def scatter_rows(given: Records, rows: Ints, records: Records) -> None:
    """Copy ``given`` ``[U, W]`` to the rows ``[U]`` of ``records``, which are distinct."""
    numba.scatter_rows(given, rows, records, 0, len(rows))
