"""Rows that lie elsewhere.

Where a few of many rows have a newer version, ids are redirected before they are looked up.
"""

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.operation import Operation
from pibroch.kernels.overlay import numba
from pibroch.kernels.overlay.numba import numbered, slots_of

__all__ = ["numbered", "redirect", "slots_of"]

IDS_PER_THREAD = 4096  # below which a further thread is not worth waking


@Operation
def redirect(row_ids: Ints, changed: Ints, slots: Array, first: int, out: Ints) -> None:
    """Write to ``out`` ``[V]`` where the newest versions of rows lie.

    Args:
        row_ids: ``[V]``; one of a changed row becomes ``first`` plus the row's last place.
        changed: rows ``[U]``.
        slots: :func:`slots_of` them.
        first: rows there are, behind which the changed ones lie.
        out: ``[V]``.
    """
    shift = numba.shift_of(slots, first)
    parallel.run(
        numba.redirect,
        len(row_ids),
        row_ids,
        changed,
        slots,
        shift,
        first,
        out,
        grain=IDS_PER_THREAD,
    )
