"""The parts of a file of scores.

Whole batches each, kept beside the file until all are there, and then put together.

Which samples a part has depends on the split and the batch size alone, so that any number of
processes may go on with them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import polars as pl

from pibroch.data import EncodedDataset
from pibroch.errors import ConfigError, StorageError
from pibroch.state.manifest import MANIFEST
from pibroch.storage import new_file, storage_errors

MOST_SAMPLES = 1 << 20
PARTS_WANTED = 64
"""Samples of a part, and at least how many parts there are, for as many processes."""
_WHAT = "of.json"


SCORES = (
    "a folder with room that this process may write to",
    "free some space, or choose another file",
    (OSError, pl.exceptions.ComputeError),  # the latter from Parquet on a full disk
)
"""What files of scores need, what to do where there is none, and what a full disk raises."""


class ScoreParts:
    """See the module.

    Args:
        out: the file.
        num_samples: in it.
        batch_size: samples that are scored together.
    """

    def __init__(self, out: Path, num_samples: int, batch_size: int) -> None:
        self.out = out
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.folder = out.with_name(f"{out.name}.parts")
        num_batches = -(-num_samples // batch_size)
        self.samples_per_part = batch_size * max(
            1, min(-(-num_batches // PARTS_WANTED), MOST_SAMPLES // batch_size)
        )

    def __len__(self) -> int:
        """How many."""
        return -(-self.num_samples // self.samples_per_part)

    def samples(self, number: int) -> range:
        """Of a part."""
        first = number * self.samples_per_part
        return range(first, min(first + self.samples_per_part, self.num_samples))

    def batches(self, number: int) -> list[range]:
        """Samples of a part that are scored together."""
        samples = self.samples(number)
        return [
            samples[first : first + self.batch_size]
            for first in range(0, len(samples), self.batch_size)
        ]

    def claim(self, checkpoint: Path, dataset: EncodedDataset, split: str) -> None:
        """Make the folder, or go on with that of the same scores.

        Raises:
            ConfigError: when those of others are there.
        """
        text = json.dumps(
            {
                "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest(),
                "data": dataset.fingerprint,
                "samples": dataset.samples,
                "split": split,
                "samples_per_part": self.samples_per_part,
            },
            sort_keys=True,
        )
        with storage_errors(self.out, *SCORES):
            self.folder.mkdir(exist_ok=True)
        what = self.folder / _WHAT
        if what.exists() and what.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{self.folder}, begun with another checkpoint, data or split",
                "parts of the same scores",
                "remove that folder, or choose another --out",
            )
        with new_file(what, *SCORES) as file:
            file.write_text(text, encoding="utf-8")

    def missing(self) -> list[int]:
        """Parts that are not there."""
        return [number for number in range(len(self)) if not self._file(number).exists()]

    def publish(self, number: int, frame: pl.DataFrame) -> None:
        """A part is there, all of it or none."""
        with new_file(self._file(number), *SCORES) as file:
            frame.write_parquet(file)

    def merge(self) -> None:
        """Put all parts together and remove them.

        Raises:
            StorageError: when some are not there.
        """
        missing = self.missing()
        if missing:
            raise StorageError(
                f"no part {missing[0]} of {len(self)} in {self.folder}, though it was written",
                "a folder that all processes share",
                "choose an --out on a file system that all hosts have, and give the command again",
            )
        whole = pl.scan_parquet([self._file(number) for number in range(len(self))])
        with new_file(self.out, *SCORES) as file:
            (whole.sink_parquet if self.out.suffix == ".parquet" else whole.sink_csv)(file)
        shutil.rmtree(self.folder)

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.parquet"
