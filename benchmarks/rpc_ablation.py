"""What each latency policy of pibroch's RPC is worth.

A pair of workers without it, in turns with a pair that has all.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.comparison import OURS
from benchmarks.contender import ContenderSpec
from benchmarks.environments import our_python
from benchmarks.latency_policies import SWITCHED_OFF
from benchmarks.results import Row
from benchmarks.workers.rpc_pibroch import WITHOUT

POLICIES = tuple(SWITCHED_OFF)
MEANINGS = (
    (
        "each contender is a pair of workers without one policy; `over_pibroch` is its time over"
        " that of a pair with all of them"
    ),
    (
        "policies act on each other: a caller that reads its own answer spins there and not in the"
        " loop"
    ),
)


def specs() -> tuple[ContenderSpec, ...]:
    """A pair with all policies, and one without each."""
    whole = ContenderSpec(OURS, "rpc_pibroch:build", our_python())
    return whole, *(
        replace(whole, label=label_of(name), environment={WITHOUT: name}) for name in POLICIES
    )


def label_of(policy: str) -> str:
    """In tables.

    >>> label_of("run_on_loop")
    'without run on loop'
    """
    return f"without {policy.replace('_', ' ')}"


def worth(rows: list[Row]) -> list[str]:
    """One line a policy: how much longer calls take without it, by call."""
    lines = []
    for name in POLICIES:
        own = [row for row in rows if row["contender"] == label_of(name)]
        message = ", ".join(
            f"{row['call']} {row['size']} {row['over_pibroch']:.2f}x".replace("  ", " ")
            for row in own
        )
        lines.append(f"**{label_of(name)}: {message}**")
    return lines
