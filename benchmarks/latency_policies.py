"""Policies that shorten the latency of calls, and how each is switched off to measure its worth.

All are on, and they are not options for users: the benchmark ``rpc`` switches each off in turn, in
its section ``ablation``.

- ``spin``: when the next event is due, poll for it for a moment before sleeping
  (``wire/reactor.py``, ``transport/stream.py``).
- ``run_on_loop``: functions that were short lately run on the loop, not on the pool
  (``calls/service.py``).
- ``caller_reads``: a caller that waits for an answer on the only stream of a connection reads it
  itself (``calls/futures.py``).
"""

from __future__ import annotations

from typing import Any

from pibroch.rpc.calls import service
from pibroch.rpc.calls.futures import Waiter
from pibroch.rpc.calls.pool import Pool
from pibroch.wire import reactor

_wait = Waiter.wait


def _wait_for_the_loop(self: Waiter, pool: Pool, timeout_s: float, stream: object = None) -> Any:
    """``Waiter.wait`` that leaves the stream to the loop."""
    return _wait(self, pool, timeout_s)


SWITCHED_OFF: dict[str, tuple[Any, str, Any]] = {
    "spin": (reactor, "SPIN_S", 0.0),
    "run_on_loop": (service, "_SHORT_S", 0.0),
    "caller_reads": (Waiter, "wait", _wait_for_the_loop),
}
"""By policy: what to set, before a worker joins, so that it does without."""
