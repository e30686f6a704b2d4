"""Scores of a whole split in a file.

In order, part by part, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

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
from pibroch.errors import ConfigError, DataError
from pibroch.score.parts import SCORES, ScoreParts
from pibroch.serve.predictor import Predictor
from pibroch.storage import new_file, storage_errors
from pibroch.train.metrics import Predictions

FORMATS = (".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class Scored:
    """What was done.

    Attributes:
        num_samples: in the file.
        num_kept: of them, those that an earlier run had scored.
    """

    num_samples: int
    num_kept: int


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
    ``score``, a probability. Parts are kept in a folder beside ``out`` until all are there; one
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
            parts.publish(number, frame_of(scores, samples.start, dataset.has_labels))
        else:
            advance(len(samples))
    parts.merge()
    return Scored(len(opened), len(opened) - sum(len(parts.samples(number)) for number in missing))


def write_predictions(predictions: Predictions, out: Path) -> None:
    """The same file from predictions that were collected; each logit becomes a probability."""
    logits, labels = predictions.arrays()
    frame = frame_of([(logits, labels.astype(np.float32))], 0)
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
    has_labels: bool = True,
) -> pl.DataFrame:
    """Logits and labels as the columns of the file."""
    logits, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
    scores = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    samples = np.arange(first, first + len(logits))
    label = pl.Series(labels)
    if not has_labels:
        label = pl.repeat(None, len(labels), dtype=pl.Float32, eager=True)
    return pl.DataFrame({"sample": samples, "label": label, "score": scores.astype(np.float32)})
