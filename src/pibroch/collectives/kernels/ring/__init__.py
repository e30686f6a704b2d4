"""Rings of slots in shared memory, into which other processes put messages."""

from pibroch.collectives.kernels.ring.numba import (
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
    take,
    wait_for_change,
    wake_sleepers,
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
    "take",
    "wait_for_change",
    "wake_sleepers",
]
