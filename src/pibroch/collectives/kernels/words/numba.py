"""Numbers in shared memory that one process raises and others wait for.

Places are addresses, as in `kernels.atomics`.
"""

from __future__ import annotations

from pibroch.collectives.kernels import atomics
from pibroch.kernels.policy import kernel

load = atomics.load
store = atomics.store
wake = atomics.wake
pause = atomics.pause
nanoseconds = atomics.nanoseconds
sleep_on = atomics.sleep_on
SPINS = 200
NAP_US = 500


@kernel
def read(address: int) -> int:
    """The number, with all that was written before it was."""
    return load(address)


@kernel
def write(address: int, value: int) -> None:
    """Say a number to whoever waits, after all that was written before."""
    store(address, value)
    wake(address)


@kernel
def wait(address: int, least: int, microseconds: int) -> int:
    """Wait until the number is at least ``least``, or the time is over; returns the number."""
    until = nanoseconds() + 1000 * microseconds
    spins = 0
    while True:
        value = load(address)
        if value >= least or nanoseconds() > until:
            return value
        spins += 1
        if spins < SPINS:
            pause()
        else:
            sleep_on(address, value, NAP_US)
