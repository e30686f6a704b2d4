"""Scores from a checkpoint or an export alone: no data set, no process group, no optimizer.

Evaluation, bulk prediction and the server stand on it. Nothing of a predictor changes after it was
opened, so that any number of threads may ask it at once: averages are worked out when it opens, and
what would be switched for a call (gradients, autocast) belongs to the calling thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.config import RunConfig
from pibroch.data import JaggedBatch
from pibroch.data.encode import is_known
from pibroch.data.raw_batch import batch_from_raw
from pibroch.data.schema import CategoricalFeature
from pibroch.data.targets import scores_of_logits
from pibroch.data.transform import FIRST_ROW
from pibroch.embedding.row_index import LearningIndex
from pibroch.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from pibroch.exchange import EmbeddingOutput, Embeddings
from pibroch.models.base import Model
from pibroch.serve.from_checkpoint import open_checkpoint
from pibroch.serve.from_delta import open_exported
from pibroch.serve.model import OpenedModel
from pibroch.serve.row_files import MappedRows
from pibroch.serve.split_rows import RowsAsked, RowSplit, SplitRows
from pibroch.state.delta_format import is_exported

_AS_IT_IS = nullcontext()
Rows = Sequence[Mapping[str, object]]
Columns = Mapping[str, Sequence[object]]


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch some of whose rows are on their way from other hosts.

    Attributes:
        rows: these, and those that are here.
        dense: what the layers above made of the dense features; ``None`` where they need the rows
            for all they do.
    """

    rows: RowsAsked
    dense: Tensor | None


class Predictor:
    """A trained model that predicts, by the moving averages where the run kept them.

    Made by :meth:`open`.

    Calls from several threads at once are safe; each uses as many threads as torch does, or fewer
    while others compute. Torch's number of threads and its random numbers stay as they are.

    Attributes:
        schema: of the data that it was trained on.
        columns: of raw rows, those that it reads.
        version: a name of its weights, different for others.
        step: after which it was saved.
        event_time: until which it was trained, in milliseconds since 1970;
            ``None`` where it is not known.
        features: the categorical features that a batch holds, in the order of the model.
        logit_labels: labels whose loss gives no probabilities, so that scores are logits.
        dim: numbers of an embedding, D.
        dense: the layers above the embeddings, which are not to be changed.
        takes_raw: whether the dictionaries that raw values need are there.
        is_remote: whether rows lie on other hosts; a call then waits for them, and may raise
            WorkerLostError.

    Example: see ``examples/predict.py``.
    """

    def __init__(self, model: OpenedModel) -> None:
        self.schema = model.schema
        self.version = model.version
        self.step = model.step
        self.event_time = model.event_time
        self.columns = self.schema.used_columns(with_label=False)
        self.features = model.features
        self.logit_labels = model.logit_labels
        self.dim = model.dim
        self.dense = model.dense.eval().requires_grad_(False)
        self.takes_raw = model.vocabularies is not None
        self.is_remote = isinstance(model.lookup, SplitRows)
        self._model = model
        self._encoders = None if model.vocabularies is None else model.vocabularies.encoders()

    @classmethod
    def open(
        cls,
        path: str | Path,
        data: str | Path | None = None,
        beside: Predictor | None = None,
        split: RowSplit = RowSplit(),
    ) -> Self:
        """Open an export, a checkpoint, or the best checkpoint of a run directory.

        Every byte is verified.

        An export is mapped: its tables take no memory of this process's own. A checkpoint takes the
        time to read its files twice and the memory of the weights (and, with averages, up to 256
        MiB on the way).

        Args:
            path: an export, a delta beside what it begins at, a checkpoint folder or a run
                directory.
            data: the dataset that a checkpoint was trained on, whose dictionaries raw values need;
                where the run found it when absent. A checkpoint of hashed and whole-number features
                needs none, and an export has its own.
            beside: a predictor that is open; a delta that begins at it, or at its export, shares
                its tables and dictionaries.
            split: where an export's rows are, if several hosts have them.

        Raises:
            CheckpointError: when it is missing, damaged, or not of this version's models; and for a
                checkpoint, whose rows are not split.
            DataError: when there is no dataset at ``data``.
        """
        path = Path(path)
        if is_exported(path):
            return cls(open_exported(path, None if beside is None else beside._model, split=split))
        if not split.is_whole:
            raise CheckpointError(
                f"{path}, a checkpoint, for rows on several hosts",
                "an export",
                "write one with `pibroch export`",
            )
        return cls(open_checkpoint(path, None if data is None else Path(data)))

    def exported_rows(self, sha256: str) -> MappedRows | None:
        """The rows of the export with this checksum, where this is it or stands on it."""
        export = self._model.export
        rows = export.lookup
        return rows if export.sha256 == sha256 and isinstance(rows, MappedRows) else None

    def follows(self, other: Predictor) -> bool:
        """Whether this is a delta that stands on the same export as another version."""
        export = self._model.root
        return export is not None and export.sha256 == other._model.export.sha256

    def reach_rows(self) -> None:
        """Ask each host that has some of the rows for one; nothing to do where all are here.

        Raises:
            WorkerLostError: for one that does not have this export's, or does not answer.
        """
        if isinstance(self._model.lookup, SplitRows):
            self._model.lookup.reach()

    def check_files(self) -> None:
        """Check that the mapped files have not changed since, at most every few milliseconds.

        Raises:
            DamagedCheckpointError: when one was written to or cut; it must not predict any more, as
                a read beyond the end of a file that was cut ends the process.
        """
        if self._model.files is not None:
            self._model.files.check()

    @property
    def is_intact(self) -> bool:
        """Whether :meth:`check_files` finds nothing."""
        try:
            self.check_files()
        except DamagedCheckpointError:
            return False
        return True

    @property
    def config(self) -> RunConfig:
        """The configuration of the run.

        Raises:
            CheckpointError: for an export, which does not keep it.
        """
        if self._model.config is None:
            raise CheckpointError(
                f"the recipe of {self._model.source}, an export", "a checkpoint, which has it"
            )
        return self._model.config

    def begin(self, batch: JaggedBatch) -> Begun:
        """Ask other hosts for the rows of a batch, and do what can be done before they come.

        Waits for nothing.

        Raises:
            PibrochError: as :meth:`logits`.
        """
        assert isinstance(self._model.lookup, SplitRows) and isinstance(self.dense, Model)
        self.check_files()
        rows = self._model.lookup.ask(batch)
        with torch.inference_mode(), self._autocast():
            return Begun(rows, self.dense.begin(batch.dense))

    def logits(self, batch: JaggedBatch, begun: Begun | None = None) -> Tensor:
        """Logits of a batch, float32 ``[B]``, of several tasks ``[B, T]``; labels are not read.

        With the bits of the trainer's own, or for up to 16 samples within rounding of these.

        Args:
            batch: with all :attr:`features`, in any order, and the schema's dense features in
                theirs. One that lacks some of the features counts as having empty bags there, with
                one logged warning.
            begun: what :meth:`begin` gave for it.

        Raises:
            DataError: when the batch does not fit the model.
            RowIdError: for an id outside its table.
            DamagedCheckpointError: when files of an export were changed since it was opened.
        """
        if not isinstance(batch, JaggedBatch):
            raise DataError(
                f"a {type(batch).__name__} to predict",
                "a pibroch.JaggedBatch",
                "make one, e.g. by JaggedBatch.from_one_hot",
            )
        self.check_files()
        # in a new thread it takes over the program's number, for which oneDNN would not ask
        torch.get_num_threads()
        with torch.inference_mode(), self._autocast():
            logits: Tensor
            if begun is None:
                logits = self.dense(batch.dense, partial(self._model.lookup, batch))
            else:
                logits = self.dense.finish(batch.dense, begun.dense, begun.rows())  # type: ignore[operator]
        # a copy from outside inference mode is a tensor like any other
        return logits.to(torch.float32, copy=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        """What computes as the model was trained.

        Left out where nothing is to be switched, as it costs 6 us.
        """
        is_bf16 = self._model.bf16
        if is_bf16 or torch.is_autocast_enabled("cpu"):
            return torch.autocast("cpu", torch.bfloat16, enabled=is_bf16, cache_enabled=False)
        return _AS_IT_IS

    def scores(self, batch: JaggedBatch) -> Tensor:
        """Probabilities of a batch, float64 ``[B]``; as :meth:`logits` else.

        Of a label of numbers, the number that is predicted; of :attr:`logit_labels`, the logit. Of
        several labels ``[B, T]``.
        """
        return torch.from_numpy(self.scores_of(self.logits(batch).numpy()))

    def scores_of(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores of logits, see :meth:`scores`: the same wherever they are computed."""
        return scores_of_logits(logits, self.schema, self.logit_labels)

    def embed(self, batch: JaggedBatch, begun: Begun | None = None) -> Tensor:
        """The embeddings of a batch, float32 ``[B, F, D]``, features in the order of the model.

        Errors as of :meth:`logits`.

        Raises:
            ConfigError: for a model that reads sequences, whose embeddings are not pooled.
        """
        vectors = self.looked_up(batch, begun)
        if not isinstance(vectors, Tensor):
            raise ConfigError(
                f"embeddings of {self._model.source}, a model of sequences, which pools none",
                "scores of it, or a model that pools them",
            )
        return vectors

    def looked_up(self, batch: JaggedBatch, begun: Begun | None = None) -> Tensor | EmbeddingOutput:
        """What the model's layers are given: as :meth:`embed`, or each feature's by its name.

        Errors as of :meth:`logits`.
        """
        self.check_files()
        with torch.no_grad():
            return self._model.lookup(batch) if begun is None else begun.rows()

    def knows(self, batch: JaggedBatch, feature: str) -> Tensor:
        """Which samples' bags of a feature have an id with a row of its own, bool ``[B]``.

        Unknown and missing values have none, nor have raw ids that were not admitted, or lost it.
        """
        (described,) = (each for each in self.schema.categorical if each.name == feature)
        bags = batch.pick((feature,))
        ids = bags.values.numpy()
        has_row = is_known(described, ids) & self._model.lookup.has_rows(feature, ids)
        samples = torch.arange(batch.batch_size).repeat_interleave(bags.lengths())
        return samples[has_row].bincount(minlength=batch.batch_size) > 0

    def __call__(self, batch: JaggedBatch) -> Tensor:
        """See :meth:`scores`."""
        return self.scores(batch)

    def encode(self, raw: Rows | Columns) -> JaggedBatch:
        """Raw values, by the transform and the dictionaries of preparation, as a batch.

        Args:
            raw: B samples, each with a value for all :attr:`columns`; or columns of B values each.
                ``None`` and the empty string are missing; other columns are not looked at.

        Raises:
            CheckpointError: when the dictionaries are not known.
            DataError: for a column that is absent, or a value that is no finite number where one is
                needed.
        """
        if self._encoders is None:
            raise CheckpointError(
                f"raw rows for {self._model.source}, which does not hold the dictionaries of its"
                " data",
                "an export, or the data set that it was trained on",
                "serve what `pibroch export` wrote, or pass --data DIR",
            )
        self.check_files()
        columns = raw if isinstance(raw, Mapping) else columns_of(raw, self.columns)
        wanted = {name: columns[name] for name in self.columns if name in columns}
        return batch_from_raw(self.schema, self._encoders, wanted)

    def ids_with_rows(self, feature: CategoricalFeature) -> range | NDArray[np.int64]:
        """A feature's ids that have rows of their own: of a table that learns its ids ``[U]``.

        Ids that a delta has dropped may be among them.

        Args:
            feature: of a model whose dictionaries are known.
        """
        lookup = self._model.lookup
        if isinstance(lookup, MappedRows):
            learned = lookup.learned_ids(feature.table)
        else:
            assert isinstance(lookup, Embeddings), "rows are here"
            index = lookup.row_indices[feature.table]
            learned = index.entries()[1] if isinstance(index, LearningIndex) else None
        if learned is not None:
            return learned
        assert self._encoders is not None, "the dictionaries are known"
        num_rows = self._encoders[feature.name].num_rows or 1
        return range(min(FIRST_ROW, num_rows - 1), num_rows)

    def score_raw(self, raw: Rows | Columns) -> Tensor:
        """:meth:`scores` of raw samples, float64 ``[B]``, as :meth:`encode` takes them."""
        return self.scores(self.encode(raw))


def columns_of(rows: Sequence[object], columns: Sequence[str]) -> dict[str, list[object]]:
    """The values of raw rows by column.

    Raises:
        DataError: for what is no row, or lacks a column.
    """
    values_by_column: dict[str, list[object]] = {column: [] for column in columns}
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"a {type(row).__name__} as row {number}",
                "an object with a value for each column",
            )
        try:
            for column, values in values_by_column.items():
                values.append(row[column])
        except KeyError as error:
            raise DataError(
                f"row {number} without `{column}`",
                f"the columns {', '.join(columns)[:160]}",
                "send null for missing",
            ) from error
    return values_by_column
