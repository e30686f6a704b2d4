"""Queues of messages in shared memory between two processes each, of any length."""

from pibroch.collectives.kernels.mailbox.numba import (
    SLOT_BYTES,
    change,
    count,
    leave,
    look,
    shown,
    take,
)

__all__ = ["SLOT_BYTES", "change", "count", "leave", "look", "shown", "take"]
