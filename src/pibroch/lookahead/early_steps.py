"""How far ahead rows on servers are asked for."""

from __future__ import annotations

MOST_EARLY_STEPS = 32


def early_steps(lookahead: int) -> int:
    """How many steps before a row is read it may be asked of a server, so that the server may be late; 0 for none.

    Plans move rows two steps ahead.

    >>> [early_steps(lookahead) for lookahead in (1, 5, 6, 40, 200)]
    [0, 0, 3, 20, 32]
    """
    steps = min(MOST_EARLY_STEPS, lookahead // 2)
    return steps if steps > 2 else 0
