"""Say why something takes long, but only when it does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def notice_when_slow(logger: logging.Logger, message: str, after_seconds: float) -> Iterator[None]:
    """Log ``message`` once if the block is still running after ``after_seconds``."""
    timer = threading.Timer(after_seconds, logger.info, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
