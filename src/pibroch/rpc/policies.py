"""Policies that shorten the latency of calls.

All are on, and they are not options for users: the benchmark ``rpc`` switches each off in turn, in
its section ``ablation``, to measure what it is worth.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LatencyPolicies:
    """Which policies are on; read when a worker joins and when its connections open.

    Attributes:
        spin: when the next event is due, poll for it for a moment before sleeping
            (``wire/reactor.py``, ``stream.py``).
        run_on_loop: functions that were short lately run on the loop, not on the pool
            (``calls/service.py``).
        caller_reads: a caller that waits for an answer on the only stream of a connection reads it
            itself (``calls/futures.py``).
    """

    spin: bool = True
    run_on_loop: bool = True
    caller_reads: bool = True


POLICIES = LatencyPolicies()
