"""A small number for each address that is in use, of many that are not."""

from pibroch.exchange.lookahead.oracle.kernels.address_table.numba import (
    PLACES_PER_ADDRESS,
    copy_into,
    empty_table,
    find_or_add,
    remove,
)

__all__ = ["PLACES_PER_ADDRESS", "copy_into", "empty_table", "find_or_add", "remove"]
