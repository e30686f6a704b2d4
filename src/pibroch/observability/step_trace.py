"""A trace of some steps of a training loop: enough to see what overlaps, little enough to open."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Self

from pibroch.observability import trace

logger = logging.getLogger(__name__)

STEPS_BEFORE = 10
STEPS = 200


class StepTrace:
    """Traces steps 11 to 210 of this process, then writes the file.

    It is written sooner when the ``with`` block is left. Of a run of fewer than 20 steps the second
    half is traced: the first steps compile kernels and fill caches. When the disk refuses the file,
    there is a warning.

    Args:
        path: of the file.
        name: of the process, as viewers show it.
        num_steps: that this process will take, at most.
    """

    def __init__(self, path: Path, name: str, num_steps: int) -> None:
        self._path = path
        self._name = name
        self._first = min(STEPS_BEFORE, num_steps // 2) + 1
        self._step = 0
        self._trace: trace.Trace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def next_step(self) -> None:
        """Called before each step."""
        self._step += 1
        if self._step == self._first:
            self._trace = trace.start(self._name)
        elif self._step == self._first + STEPS:
            self._end()

    def _end(self) -> None:
        taken = self._trace
        self._trace = None
        if taken is None:
            return
        trace.stop()
        try:
            taken.write(self._path)
        except OSError as error:
            logger.warning("%s while writing %s: there is no trace", error.strerror, self._path)
