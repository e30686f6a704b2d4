"""Answers of other hosts, read by an event loop that does other work meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S, RowRequest


def when_read(
    loop: asyncio.AbstractEventLoop, requests: Sequence[RowRequest], then: Callable[[bool], None]
) -> None:
    """Call a function when all answers are there or their time is up.

    Args:
        loop: that runs.
        requests: just sent.
        then: called once; with false as soon as a connection fails. It takes the answers, or
            cancels the requests.
    """
    if not requests:
        then(True)
        return
    waiting = set(requests)

    def end(is_there: bool) -> None:
        late.cancel()
        then(is_there)

    def read(request: RowRequest) -> None:
        try:
            if not request.read():
                return
        except OSError:
            end(False)
            return
        waiting.discard(request)
        if not waiting:
            end(True)

    late = loop.call_later(ANSWER_TIMEOUT_S, end, True)
    for request in requests:
        request.watch(loop, partial(read, request))
