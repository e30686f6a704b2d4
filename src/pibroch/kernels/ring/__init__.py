"""Rings of slots in shared memory, into which other processes put messages."""

from pibroch.kernels.ring.numba import (
    ARRIVED,
    HEADER_BYTES,
    PENDING,
    READ,
    copy_bytes,
    exchange,
    has_arrived,
    put,
    put_equal,
    put_one,
    ring_bell,
    take,
    wait_for_bell,
)

__all__ = [
    "ARRIVED",
    "HEADER_BYTES",
    "PENDING",
    "READ",
    "copy_bytes",
    "exchange",
    "has_arrived",
    "put",
    "put_equal",
    "put_one",
    "ring_bell",
    "take",
    "wait_for_bell",
]
