"""Scores of a whole split in a file.

In order, part by part, so that a run that was cut off goes on where it was. A part is kept only
while what it was computed from is the same to the byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pibroch.data import EncodedDataset, Split
from pibroch.data.dataset import DATASET, SCORE_COLUMNS, SplitName
from pibroch.data.line_runs import places_of
from pibroch.data.loader import batch_of
from pibroch.data.targets import scores_of_logits
from pibroch.errors import ConfigError, DataError, StorageError
from pibroch.serve.predictor import Predictor
from pibroch.state.manifest import MANIFEST
from pibroch.storage import new_file, storage_errors
from pibroch.train.metrics import Predictions
from pibroch.version import __version__

logger = logging.getLogger(__name__)
FORMATS = (".parquet", ".csv")
MOST_SAMPLES = 1 << 20
PARTS_WANTED = 64
"""Samples of a part, and at least how many parts there are, for as many processes."""
SAMPLE, FILE, LINE, LABEL, SCORE, LOGIT = SCORE_COLUMNS
_WHAT = "of.json"
_DATA = "data"
_PATH = "data_path"
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

        Parts of data that were replaced in their place since, which nobody can go on with, are
        removed with a warning.

        Raises:
            ConfigError: when those of others are there.
        """
        about = {
            "checkpoint": hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest(),
            "split": split,
            "batch_size": self.batch_size,
            "version": __version__,
            _DATA: dataset.sources_digest,
            _PATH: str(dataset.path.resolve()),
        }
        what = self.folder / _WHAT
        before = _read(what)
        differing = [key for key in about if key != _PATH and before.get(key) != about[key]]
        if before and differing:
            if differing != [_DATA] or before.get(_PATH) != about[_PATH]:
                raise ConfigError(
                    f"{self.folder}, begun with another checkpoint, data or split",
                    "parts of the same scores",
                    "remove that folder, or choose another --out",
                )
            logger.warning(
                "%s has changed since the parts in %s were scored: they are scored again",
                dataset.path,
                self.folder,
            )
            with storage_errors(self.out, *SCORES):
                shutil.rmtree(self.folder)
        with storage_errors(self.out, *SCORES):
            self.folder.mkdir(exist_ok=True)
        with new_file(what, *SCORES) as file:
            file.write_text(json.dumps(about, sort_keys=True), encoding="utf-8")

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


def _read(what: Path) -> dict[str, Any]:
    """What parts are of; nothing where there are none, and where their file is damaged."""
    try:
        content = json.loads(what.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return {"damaged": True}
    return content if isinstance(content, dict) else {"damaged": True}


class ScoreColumns:
    """The columns of a file of scores: what says which sample it is, its labels, its scores.

    ``sample`` is its place in the split, ``file`` and ``line`` (of Parquet the row, from 1 on) say
    where it stood when the data were prepared, then follow columns that preparation kept. ``label``
    is null where the data have none. ``score`` is a probability, the number that is predicted, or
    the logit where the loss gives no probabilities; ``logit`` is there in any case. Of several
    labels it is ``label.NAME``, ``score.NAME`` and ``logit.NAME`` of each.

    Args:
        dataset: with the samples.
        split: of it.
        logit_labels: labels whose loss gives no probabilities.

    Raises:
        DataError: for lines that do not fit the split.
    """

    def __init__(self, dataset: EncodedDataset, split: Split, logit_labels: Sequence[str]) -> None:
        self._schema = dataset.schema
        self._has_labels = dataset.has_labels
        self._split = split
        self._logit_labels = logit_labels
        self._sources = pl.Series(dataset.sources, dtype=pl.String)
        if (runs := split.lines) is not None:
            fits = len(runs) and not runs[0, 0] and runs[:, 1].min() >= 0
            if not fits or runs[:, 1].max() >= len(self._sources):
                raise DATASET(f"lines of {dataset.path} that do not fit its files", "such")

    def frame(
        self, parts: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]], first: int
    ) -> pl.DataFrame:
        """Of logits and labels, ``[N]`` or ``[N, T]``, of samples ``first`` and so on."""
        logits, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        size = len(logits)
        scores = scores_of_logits(logits, self._schema, self._logit_labels).reshape(size, -1)
        logits = logits.reshape(size, -1)
        end = first + size
        columns: dict[str, pl.Series] = {SAMPLE: pl.Series(np.arange(first, end))}
        if self._split.lines is not None:
            places = places_of(self._split.lines, first, end)
            columns[FILE] = self._sources.gather(places[:, 0])
            columns[LINE] = pl.Series(places[:, 1])
        for name, texts in self._split.kept.items():
            columns[name] = pl.Series(texts.between(first, end), dtype=pl.String)
        for task, name in enumerate(self._schema.label_columns):
            suffix = f".{name}" if len(self._schema.label_columns) > 1 else ""
            columns[f"{LABEL}{suffix}"] = (
                pl.Series(labels.reshape(size, -1)[:, task])
                if self._has_labels
                else pl.repeat(None, size, dtype=pl.Float32, eager=True)
            )
            columns[f"{SCORE}{suffix}"] = pl.Series(scores[:, task])
            columns[f"{LOGIT}{suffix}"] = pl.Series(logits[:, task])
        return pl.DataFrame(columns)


def score_split(
    predictor: Predictor,
    checkpoint: Path,
    dataset: EncodedDataset,
    split: str,
    out: Path,
    advance: Callable[[int], None] = lambda _: None,
) -> Scored:
    """Write the score of each sample of a split, in the split's order, to a Parquet or CSV file.

    Columns are those of :class:`ScoreColumns`. Parts are kept in a folder beside ``out`` until all
    are there; one that is there already, of the same checkpoint and data, is not scored again.

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
    columns = ScoreColumns(dataset, opened, predictor.logit_labels)
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
            parts.publish(number, columns.frame(scores, samples.start))
        else:
            advance(len(samples))
    parts.merge()
    return Scored(len(opened), len(opened) - sum(len(parts.samples(number)) for number in missing))


def write_predictions(predictions: Predictions, columns: ScoreColumns, out: Path) -> None:
    """The same file from predictions that were collected."""
    logits, labels = predictions.arrays()
    frame = columns.frame([(logits, labels.astype(np.float32))], 0)
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
