"""Answers of other hosts in an event loop, which reads them as they come and does other work meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S, RowRequest


def when_read(loop: asyncio.AbstractEventLoop, requests: Sequence[RowRequest], then: Callable[[bool], None]) -> None:
    """Call a function when all answers are there or their time is up, so that asking for them waits no more.

    Args:
        loop: that runs.
        requests: just sent.
        then: called once; with false as soon as a connection fails.
    """
    waiting = {request.fileno(): request for request in requests}
    if not waiting:
        then(True)
        return

    def end(is_there: bool) -> None:
        late.cancel()
        for number in waiting:
            loop.remove_reader(number)
        waiting.clear()
        then(is_there)

    def read(number: int) -> None:
        try:
            if not waiting[number].read():
                return
        except OSError:
            end(False)
            return
        loop.remove_reader(number)
        del waiting[number]
        if not waiting:
            end(True)

    late = loop.call_later(ANSWER_TIMEOUT_S, end, True)
    for number in waiting:
        loop.add_reader(number, read, number)
