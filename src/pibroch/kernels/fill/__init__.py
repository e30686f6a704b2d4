"""Random fills of tables: row i of the weights ``[R, D]`` is the table's ``rows[i]``."""

import numpy as np

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.fill import numba
from pibroch.kernels.operation import Operation

__all__ = ["fill_normal", "fill_uniform"]


@Operation
def fill_uniform(weights: Records, rows: Ints, key: int, bound: float) -> None:
    """Uniform in [-bound, bound), a function of the key and the element's number in its table."""
    parallel.run(numba.fill_uniform, len(weights), weights, rows, np.uint64(key), np.float32(bound))


@Operation
def fill_normal(weights: Records, rows: Ints, key: int, std: float) -> None:
    """Normal(0, std), a function of the key and the element's number in its table."""
    parallel.run(numba.fill_normal, len(weights), weights, rows, np.uint64(key), np.float32(std))
