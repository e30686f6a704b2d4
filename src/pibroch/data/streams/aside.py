"""Bad records, set aside in a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pibroch.data.storage import read_json_lines
from pibroch.data.streams.base import BadRecord
from pibroch.errors import DataError
from pibroch.storage import append_json_lines, new_file, storage_errors

_COUNTED_AT_LEAST = 10_000
SHOWN = 3


class SetAside:
    """A line for each bad record, with the step that it would have been in.

    Args:
        path: of the file, of this rank alone: its name ends with ``-RANK``. A run with a name
            appends that, so that several may have the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_step = 0

    def go_on_after(
        self, step: int, run: str | None = None, part: tuple[int, int] = (0, 1)
    ) -> None:
        """Drop the lines of later steps, whose records are read again.

        Args:
            step: after which the run goes on.
            run: its name; none where nothing tells runs apart.
            part: ``(rank, world_size)``; lines of ranks that there are no more go, too.
        """
        rank, world_size = part
        paths = [self._path]
        if run is not None:
            kind = self._path.stem.rpartition("-")[0]
            self._path = self._path.with_stem(f"{self._path.stem}-{run}")
            paths = [
                path
                for path in self._path.parent.glob(f"{kind}-*-{run}.jsonl")
                if int(path.stem.split("-")[-2]) % world_size == rank
            ]
        for path in paths:
            self._drop_after(step, path)

    def add(self, step: int, bad: Sequence[BadRecord]) -> None:
        """Write those of a step down; a step that comes again has these alone.

        Raises:
            StorageError: when the disk refuses.
        """
        if step == self._last_step:  # the journal has refused it
            self._drop_after(step - 1, self._path)
        self._last_step = step
        if bad:
            with storage_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
            append_json_lines(self._path, *({"step": step, **asdict(each)} for each in bad))

    def _drop_after(self, step: int, path: Path) -> None:
        lines = read_json_lines(path)
        kept = [line for line in lines if line["step"] <= step]
        if len(kept) < len(lines):
            with new_file(path) as new:
                new.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")


def check_share(num_bad: int, num_records: int, most_share: float, latest: Sequence[str]) -> None:
    """Refuse a stream with too many bad records; a share of 10,000 is always allowed.

    Raises:
        DataError: names the latest.
    """
    if num_bad <= most_share * max(num_records, _COUNTED_AT_LEAST):
        return
    shown = "; ".join(latest[:SHOWN])
    raise DataError(
        f"{num_bad:,} bad of {num_records:,} records of the stream{': ' if shown else ''}{shown}",
        f"at most a share of {most_share:g}",
        "look at what was set aside, correct the schema, or allow more by `most_bad_share`",
    )
