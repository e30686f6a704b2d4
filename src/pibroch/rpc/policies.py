"""What makes calls quick beyond doing little.

Each policy alone can be switched off, to measure what it is worth.

Not an option of users': all are on. Topic ``rpc`` of the benchmarks switches them, in its section
``ablation``.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LatencyPolicies:
    """Read when a worker joins and when its connections open.

    Attributes:
        spin: where the next event is due, look for it for a moment before sleeping
            (``transport/reactor.py``, ``stream.py``).
        deputy: another thread takes the loop over from a function that holds it up
            (``transport/reactor.py``).
        run_on_loop: functions that were short lately run on the loop, not on the pool
            (``calls/service.py``).
        caller_reads: who waits for an answer on the only stream of a connection reads it
            (``calls/futures.py``).
        notice_stuck: the pool grows when its threads neither end nor compute (``calls/pool.py``).
        give_back: a result that is a received tensor which nobody else holds goes back by its place
            (``transport/sharing.py``).
    """

    spin: bool = True
    deputy: bool = True
    run_on_loop: bool = True
    caller_reads: bool = True
    notice_stuck: bool = True
    give_back: bool = True


POLICIES = LatencyPolicies()
