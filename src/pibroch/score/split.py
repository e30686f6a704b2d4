"""Scores of a whole split in a file.

In order, part by part, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pibroch.data import EncodedDataset, Split
from pibroch.data.dataset import SplitName
from pibroch.data.loader import batch_of
from pibroch.data.targets import scores_of_logits
from pibroch.errors import ConfigError, DataError, StorageError
from pibroch.serve.predictor import Predictor
from pibroch.state.manifest import MANIFEST
from pibroch.storage import new_file, storage_errors
from pibroch.train.metrics import Predictions

FORMATS = (".parquet", ".csv")
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


@dataclass(frozen=True, slots=True)
class Scored:
    """What was done.

    Attributes:
        num_samples: in the file.
        num_kept: of them, those that an earlier run had scored.
    """

    num_samples: int
    num_kept: int


class ScoreParts:
    """The parts: whole batches each, kept beside the file until all are there, then put together.

    Which samples a part has depends on the split and the batch size alone, so that any number of
    processes may go on with them.

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


def score_split(
    predictor: Predictor,
    checkpoint: Path,
    dataset: EncodedDataset,
    split: str,
    out: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> Scored:
    """Write the score of each sample of a split, in the split's order, to a Parquet or CSV file.

    Columns are ``sample`` (its place in the split), ``label`` (null where the data have none) and
    ``score``, a probability, or the number that is predicted; of several labels ``label.NAME`` and
    ``score.NAME`` of each. Parts are kept in a folder beside ``out`` until all are there; one
    that is there already, of the same checkpoint and data, is not scored again.

    Args:
        predictor: of the checkpoint.
        checkpoint: its folder.
        dataset: that fits the model.
        split: train, validation or test.
        out: the file; there must be none.
        advance: told how many more samples are done.

    Raises:
        ConfigError: for a file that is there already or of another kind, or parts of other scores
            beside it.
        DataError: for a split without samples.
        StorageError: when the disk refuses; parts that are written stay.
    """
    check_out(out)
    opened = opened_split(dataset, split, needs_labels=False)
    parts = ScoreParts(out, len(opened), predictor.config.train.evaluate_batch_size)
    parts.claim(checkpoint, dataset, split)
    missing = set(parts.missing())
    for number in range(len(parts)):
        samples = parts.samples(number)
        if number in missing:
            scores = []
            for some in parts.batches(number):
                batch = batch_of(opened, np.arange(some.start, some.stop))
                scores.append((predictor.logits(batch).numpy(), batch.labels.numpy()))
                advance(len(some))
            parts.publish(number, frame_of(scores, samples.start, dataset))
        else:
            advance(len(samples))
    parts.merge()
    return Scored(len(opened), len(opened) - sum(len(parts.samples(number)) for number in missing))


def write_predictions(predictions: Predictions, dataset: EncodedDataset, out: Path) -> None:
    """The same file from predictions that were collected."""
    logits, labels = predictions.arrays()
    frame = frame_of([(logits, labels.astype(np.float32))], 0, dataset)
    with new_file(out, *SCORES) as file:
        (frame.write_parquet if out.suffix == ".parquet" else frame.write_csv)(file)


def check_out(out: Path) -> None:
    """Refuse a file that scores cannot be written to before they are computed.

    Raises:
        ConfigError: for one that is there already, of another kind, or in no folder.
        StorageError: where nothing can be written.
    """
    if out.suffix not in FORMATS:
        raise ConfigError(f"{out} for scores", f"a file that ends in {' or '.join(FORMATS)}")
    if out.exists():
        raise ConfigError(
            f"{out}, which is there already",
            "a file that is not",
            "remove it, or choose another name",
        )
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}, which is no folder", "a folder for the scores", "make it")
    with storage_errors(out, *SCORES), tempfile.TemporaryFile(dir=out.parent):
        pass


def opened_split(dataset: EncodedDataset, split: str, needs_labels: bool = True) -> Split:
    """A split that has samples, and labels where these are needed.

    Raises:
        ConfigError: when there is no such split.
        DataError: when it has no samples, or no labels.
    """
    if split not in dataset.samples:
        raise ConfigError(
            f"split {split!r}", f"one of {', '.join(dataset.samples)}", "change --split"
        )
    if not dataset.samples[split]:
        raise DataError(
            f"no {split} samples in {dataset.path}", "a split with samples", "pass another --split"
        )
    if needs_labels and not dataset.has_labels:
        raise DataError(
            f"{dataset.path}, which has no labels", "labels, to compare with", "use pibroch predict"
        )
    return dataset.split(cast(SplitName, split))


def frame_of(
    parts: list[tuple[NDArray[np.float32], NDArray[np.float32]]],
    first: int,
    dataset: EncodedDataset,
) -> pl.DataFrame:
    """Logits and labels, ``[N]`` or ``[N, T]``, as the columns of the file."""
    logits, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    size = len(logits)
    schema = dataset.schema
    scores = scores_of_logits(logits, schema).reshape(size, -1)
    columns: dict[str, pl.Series] = {"sample": pl.Series(np.arange(first, first + size))}
    for task, name in enumerate(schema.label_columns):
        suffix = f".{name}" if len(schema.label_columns) > 1 else ""
        columns[f"label{suffix}"] = (
            pl.Series(labels.reshape(size, -1)[:, task])
            if dataset.has_labels
            else pl.repeat(None, size, dtype=pl.Float32, eager=True)
        )
        columns[f"score{suffix}"] = pl.Series(scores[:, task])
    return pl.DataFrame(columns)
